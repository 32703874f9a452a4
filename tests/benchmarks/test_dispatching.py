"""Dispatch against every assignment, the integer program, Alg. 1 and longest first; the bound is a bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from benchmarks.published.dispatching import (
    Bubble,
    Method,
    compiled_greedy,
    dispatch,
    eq3_problem,
    eq3_room,
    greedy,
    widely,
)
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of
from hydragraph.planner.assignment.spread_search import SearchEffort, bounded, ends, longest_first, value
from hydragraph.planner.exact.integer_programs import exact_dispatch
from tests.planner.examples import MIXED, PROFILE, lengths, pipelines

BUBBLES = st.sampled_from(["longest", "constant"])


def eq3(given: AssignmentProblem, bubble: Bubble, p: int, items: list[int]) -> float:
    """Return a pipeline's time, written down from the formula."""
    if not items:
        return 0.0
    kind = given.pipelines[p]
    sizes = [given.lengths[i] for i in items]
    longest = max(sizes) if bubble == "longest" else kind.max_len
    alone = kind.a * longest**2 + kind.b * longest + kind.c
    return sum(kind.a * n**2 + kind.b * n for n in sizes) + kind.c + (kind.stages - 1) * alone


def best_of_all(given: AssignmentProblem, bubble: Bubble) -> float:
    best = np.inf
    for chosen in itertools.product(range(len(given.pipelines)), repeat=len(given.lengths)):
        if all(np.isfinite(given.cost[i, given.kind_of[p]]) for i, p in enumerate(chosen)):
            shares = [[i for i, q in enumerate(chosen) if q == p] for p in range(len(given.pipelines))]
            best = min(best, max(eq3(given, bubble, p, s) for p, s in enumerate(shares)))
    return best


@given(pipelines(most=3), st.lists(st.integers(1, 2000), min_size=1, max_size=6), BUBBLES)
@settings(max_examples=max(20, settings.default.max_examples // 16))
def test_search_reaches_the_best_of_all(kinds: tuple[PipelineCost, ...], sizes: list[int], bubble: Bubble) -> None:
    made = eq3_problem(kinds, sizes, bubble)
    relaxed = bounded(made, made.cost, eq3_room(made), longest_first(made))
    placed = widely(made, relaxed, SearchEffort(), 0)
    for p, end in enumerate(ends(made, placed)):
        assert end == pytest.approx(eq3(made, bubble, p, np.flatnonzero(placed == p).tolist()), rel=1e-9)
    best = best_of_all(made, bubble)
    assert relaxed.seconds <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= value(made, placed) <= best * 1.05


@pytest.mark.parametrize("bubble", ["longest", "constant"])
def test_the_integer_program_is_exact(bubble: Bubble) -> None:
    made = eq3_problem(PROFILE.pipelines([(4, 1), (2, 2), (2, 1)]), [6000, 3000, 2000, 900, 400, 100], bubble)
    assert value(made, exact_dispatch(made)) == pytest.approx(best_of_all(made, bubble), rel=1e-6)


@settings(max_examples=max(15, settings.default.max_examples // 4))
@given(pipelines(), st.lists(st.integers(0, 2000), max_size=40), BUBBLES, st.integers(0, 3))
def test_promises_hold_of_any_input(
    kinds: tuple[PipelineCost, ...], sizes: list[int], bubble: Bubble, seed: int
) -> None:
    made = eq3_problem(kinds, sizes, bubble)
    first = longest_first(made)
    relaxed = bounded(made, made.cost, eq3_room(made), first)
    placed = widely(made, relaxed, SearchEffort(), seed)
    assert sorted(itertools.chain(*made.shares(placed))) == [i for i, n in enumerate(sizes) if n]
    assert all(np.isfinite(made.cost[i, made.kind_of[p]]) for i, p in enumerate(placed))
    found = value(made, placed)
    assert relaxed.seconds <= found * (1 + 1e-9)
    if len(made.lengths):
        descended = first.copy()
        local_search.descend(descended, made.instance, np.zeros(len(kinds)))
        assert found <= max(relaxed.seconds * 1.001, min(value(made, greedy(made, 100, seed)), value(made, descended)))
    np.testing.assert_array_equal(placed, widely(made, relaxed, SearchEffort(), seed))


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_bubble_is_dispatched_within_half_a_percent_of_the_bound(seed: int) -> None:
    found = dispatch(MIXED, PROFILE, lengths(300, seed), bubble="constant")
    assert 0 <= found.gap <= 0.005


@pytest.mark.parametrize("method", ["search", "greedy", "longest first"])
def test_every_method_gives_every_sequence_to_one_pipeline(method: Method) -> None:
    sizes = lengths(50, 0)
    found = dispatch(MIXED, PROFILE, sizes, method=method)
    assert sorted(itertools.chain(*found.pipelines)) == list(range(50))
    devices = sum(tp * pp for tp, pp in MIXED)
    for scheme, share in zip(MIXED, found.pipelines, strict=True):
        assert max((sizes[i] for i in share), default=0) <= PROFILE.max_len(scheme, devices)


def alg_1(given: AssignmentProblem, orders: np.ndarray) -> float:
    """Return Alg. 1's best trial; of pipelines that delay the end equally, a sequence joins the one that ends first."""
    best = np.inf
    for order in orders:
        shares: list[list[int]] = [[] for _ in given.pipelines]
        for i in order:
            options = []
            for p in range(len(shares)):
                if np.isfinite(given.cost[i, given.kind_of[p]]):
                    after = [eq3(given, "longest", q, [*s, i] if q == p else s) for q, s in enumerate(shares)]
                    options.append((max(after), after[p], p))
            shares[min(options)[2]].append(i)
        best = min(best, max(eq3(given, "longest", p, s) for p, s in enumerate(shares)))
    return best


def test_the_compiled_greedy_is_alg_1() -> None:
    made = problem_of(PROFILE.pipelines([(4, 1), (2, 2), (2, 2)]), lengths(25, 0, 6000))
    orders = np.argsort(np.random.default_rng(0).random((5, 25)), axis=1)
    found, _ = compiled_greedy(orders, made.instance)
    assert found == pytest.approx(alg_1(made, orders), rel=1e-9)


def test_degenerate_mini_batches() -> None:
    assert dispatch(MIXED, PROFILE, []).pipelines == ((),) * len(MIXED)
    assert sum(map(len, dispatch(MIXED, PROFILE, [0, 9]).pipelines)) == 1
    equal = dispatch([(2, 1)] * 4, PROFILE, [500] * 8)
    assert [len(p) for p in equal.pipelines] == [2, 2, 2, 2]
    with pytest.raises(hg.Unsupported, match=r"sequence 1 has 10000000 tokens.*truncate it"):
        dispatch(MIXED, PROFILE, [5, 10_000_000])
    with pytest.raises(ValueError, match="at least one scheme"):
        dispatch([], PROFILE, [5])

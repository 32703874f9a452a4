"""Assignments: their promises on random input, their bound, determinism, and small cases against all assignments."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph import planner
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.reach import AttentionReach
from hydragraph.cost.stage_arrays import stage_terms
from hydragraph.planner.assignment.assign_mini_batch import (
    PlannedAssignment,
    assign_pipelines,
    bounded_pipelines,
    enveloped,
    formed_room,
)
from hydragraph.planner.assignment.problem import problem_of
from hydragraph.planner.assignment.spread_search import SearchEffort
from tests.benchmarks.test_packing import partitions
from tests.cost import priced
from tests.planner.every_assignment import exact_assignment
from tests.planner.examples import MIXED, PROFILE, lengths, pipelines, uneven
from tests.thorough import thorough


def check(kinds: tuple[PipelineCost, ...], sizes: list[int], found: PlannedAssignment) -> None:
    flat = [i for p in found.micro_batches for m in p for i in m]
    assert sorted(flat) == [i for i, n in enumerate(sizes) if n]
    for kind, p in zip(kinds, found.micro_batches, strict=True):
        assert all(0 < sum(sizes[i] for i in m) <= kind.max_len for m in p)
    true = [k.seconds([[sizes[i] for i in m] for m in p]) for k, p in zip(kinds, found.micro_batches, strict=True)]
    assert found.by_pipeline == pytest.approx(true, rel=1e-9)
    assert found.seconds == pytest.approx(max(true), rel=1e-9)
    assert found.bound <= found.seconds * (1 + 1e-9)


def test_the_example_of_the_module() -> None:
    room = formed_room(problem_of([PipelineCost(0.0, 1.0, 1.0, 4, 99, 1, 1)], [1], formed=True))
    assert room(25.0)[0] == pytest.approx(10.68, abs=5e-3)


@given(pipelines(), st.lists(st.integers(0, 2000), max_size=40))
@settings(max_examples=max(30, settings.default.max_examples // 5))
def test_promises_hold_of_any_input(kinds: tuple[PipelineCost, ...], sizes: list[int]) -> None:
    check(kinds, sizes, assign_pipelines(kinds, sizes))


@pytest.mark.parametrize(
    "text",
    [
        "<[0]x1,[1]x2,[0]x2,[1]x1>",
        "<[0]x1,[1]x1,[0]x1,[1]x1,[0]x1,[1]x1> + <[2]x3,[3]x3>",
        "<[0]x1,[1]x1,[2]x1,[0]x1,[1]x1,[2]x1> + <[3]x6>",
        "<[0]x1,[1]x2,[0]x2,[1]x1> + <[2]x2,[3]x4> zb-h1",
    ],
)
def test_promises_hold_of_interleaved_stages(text: str) -> None:
    costs = priced.costs(6, priced.cluster(4))
    kinds = tuple(costs.pipelines(hg.Strategy.parse(text, 6)))
    for seed in range(6):
        sizes = np.random.default_rng(seed).integers(1, 400, 2 + 5 * seed).tolist()
        check(kinds, sizes, assign_pipelines(kinds, sizes))


@thorough
@given(pipelines(), st.lists(st.integers(1, 2000), max_size=30), st.integers(1, 2000), st.integers(1, 2000))
@settings(max_examples=60)
def test_promises_hold_of_windows_and_chunks(
    kinds: tuple[PipelineCost, ...], sizes: list[int], window: int, chunk: int
) -> None:
    nears = [
        ((AttentionReach(window), 1e-6),),
        ((AttentionReach(window), 1e-7), (AttentionReach(chunk=chunk), 1e-6)),
        (),
    ]
    windowed = tuple(replace(kind, near=nears[i % 3]) for i, kind in enumerate(kinds))
    found = assign_pipelines(windowed, sizes)
    check(windowed, sizes, found)
    if len(sizes) <= 5:
        best, assignment = exact_assignment(windowed, sizes)
        ends = [
            k.seconds([[sizes[i] for i in m] for m in p])
            for k, p in zip(windowed, assignment.micro_batches, strict=True)
        ]
        assert max(ends) == pytest.approx(best, rel=1e-9)
        assert found.bound * (1 - 1e-9) <= best <= found.seconds * (1 + 1e-9)


def test_a_long_sequence_with_a_window_leaves_room_for_others() -> None:
    """With l^2, the long sequence fills a pipeline alone; with a window, its tokens count as those of short ones."""
    whole = PipelineCost(1e-9, 1e-6, 1e-4, 1, 32_768, 1, 1)
    windowed = replace(whole, a=0.0, near=((AttentionReach(1024), 1e-9),))
    sizes = [32_768, *[2048] * 48]
    shares = []
    for kind in (whole, windowed):
        found = assign_pipelines((kind, kind), sizes)
        check((kind, kind), sizes, found)
        shares.append(next(sum(map(len, p)) for p in found.micro_batches if any(0 in m for m in p)))
    assert shares[0] == 1
    # 49 sequences have 16 + 48 parts of 2,048 tokens: each pipeline takes about half of them.
    assert 14 <= shares[1] <= 18


@given(uneven(pipelines()), st.lists(st.integers(1, 2000), max_size=30), st.integers(0, 3))
@settings(max_examples=max(12, settings.default.max_examples // 16))
def test_promises_hold_of_uneven_stages_links_and_tables(
    kinds: tuple[PipelineCost, ...], sizes: list[int], seed: int
) -> None:
    found = assign_pipelines(kinds, sizes, seed=seed)
    check(kinds, sizes, found)
    assert found == assign_pipelines(kinds, sizes, seed=seed)
    if sizes:
        assert found.seconds <= enveloped(bounded_pipelines(kinds, sizes), seed=seed).seconds * (1 + 1e-12)


@given(uneven(pipelines(most=2)), st.lists(st.integers(1, 2000), min_size=1, max_size=5))
@settings(max_examples=max(8, settings.default.max_examples // 25))
def test_what_is_found_lies_between_the_best_of_all_and_the_bound(
    kinds: tuple[PipelineCost, ...], sizes: list[int]
) -> None:
    found = assign_pipelines(kinds, sizes)
    if not stage_terms(kinds, 1).faithful.all():
        assert found.bound <= found.seconds * (1 + 1e-9)
        return
    best, assignment = exact_assignment(kinds, sizes)
    assert max(
        k.seconds([[sizes[i] for i in m] for m in p]) for k, p in zip(kinds, assignment.micro_batches, strict=True)
    ) == pytest.approx(best, rel=1e-9)
    assert bounded_pipelines(kinds, sizes).seconds <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.seconds <= best * 1.02


@given(pipelines(most=2), st.lists(st.integers(1, 2000), min_size=1, max_size=4))
@settings(max_examples=max(10, settings.default.max_examples // 50))
def test_the_best_of_all_is_that_of_trying_everything(kinds: tuple[PipelineCost, ...], sizes: list[int]) -> None:
    best = np.inf
    for chosen in itertools.product(range(len(kinds)), repeat=len(sizes)):
        worst = 0.0
        for p, kind in enumerate(kinds):
            mine = [i for i, q in enumerate(chosen) if q == p]
            options = [
                kind.seconds([[sizes[i] for i in m] for m in order])
                for cut in partitions(mine)
                if all(sum(sizes[i] for i in m) <= kind.max_len for m in cut)
                for order in itertools.permutations(cut)
            ]
            worst = max(worst, min(options, default=np.inf) if mine else 0.0)
        best = min(best, worst)
    assert exact_assignment(kinds, sizes)[0] == pytest.approx(best, rel=1e-9)


@given(uneven(pipelines()), st.lists(st.integers(1, 2000), max_size=20), st.integers(0, 2))
@settings(max_examples=max(8, settings.default.max_examples // 40))
def test_more_effort_is_never_worse(kinds: tuple[PipelineCost, ...], sizes: list[int], seed: int) -> None:
    efforts = [
        SearchEffort(0, 1.0),
        SearchEffort(0, 1e-3),
        SearchEffort(3, 1e-3),
        SearchEffort(10, 1e-3),
        SearchEffort(10, 0.0),
        SearchEffort(40, 0.0),
    ]
    found = [assign_pipelines(kinds, sizes, effort=effort, seed=seed).seconds for effort in efforts]
    start = bounded_pipelines(kinds, sizes)
    if start.given.terms.faithful.all():
        assert found == sorted(found, reverse=True)
    elif sizes:  # the search uses constants, tables judge its result: no effort ends above the common start
        assert max(found) <= enveloped(start, seed=seed).seconds


def test_a_kind_that_has_no_time_to_do_anything_does_not_loosen_the_bound() -> None:
    useful = PipelineCost(a=1e-9, b=1e-3, c=0.0, stages=1, max_len=2000, util_len=1, devices=1)
    hopeless = replace(useful, b=1e-6, c=100.0, stages=4)
    found = assign_pipelines((useful, hopeless), [10] * 100)
    assert found.seconds == pytest.approx(1.0, rel=1e-3)
    assert found.gap <= 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_real_proportions_end_close_to_the_bound(seed: int) -> None:
    sizes = lengths(400, seed)
    found = planner.assign(MIXED, PROFILE, sizes)
    check(PROFILE.pipelines(MIXED), sizes, found)
    # The bound ignores the filling and draining of pipelines: a tenth here, mostly unavoidable.
    assert found.gap <= 0.12
    assert max(found.by_pipeline) <= 1.05 * min(found.by_pipeline)
    assert found == planner.assign(MIXED, PROFILE, sizes)


def test_the_integer_programs_assign_no_better() -> None:
    schemes = [(4, 1), (2, 2), (2, 1)]
    sizes = [3000, 0, 2000, 900, 400, 100]
    exact = planner.assign(schemes, PROFILE, sizes, method="exact")
    check(PROFILE.pipelines(schemes), sizes, exact)
    assert planner.assign(schemes, PROFILE, sizes).seconds <= exact.seconds * (1 + 1e-9)
    assert planner.assign(schemes, PROFILE, [0], method="exact").micro_batches == ((),) * 3


@thorough
def test_very_many_sequences_are_assigned_in_seconds() -> None:
    began = time.process_time()
    found = planner.assign(MIXED, PROFILE, [1] * 20_000)
    assert time.process_time() - began < 20
    assert sorted(i for p in found.micro_batches for m in p for i in m) == list(range(20_000))


def test_degenerate_mini_batches() -> None:
    nothing = planner.assign(MIXED, PROFILE, [])
    assert nothing.micro_batches == ((),) * len(MIXED)
    assert (nothing.seconds, nothing.gap) == (0.0, 0.0)
    single = planner.assign(MIXED, PROFILE, [700])
    assert sum(len(p) for p in single.micro_batches) == 1
    assert single.gap <= 1e-6
    longest = PROFILE.max_len((2, 1), 8)
    full = planner.assign([(2, 1)] * 4, PROFILE, [longest] * 8)
    assert [len(p) for p in full.micro_batches] == [2, 2, 2, 2]

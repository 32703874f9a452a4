"""The relaxation is a bound: below every way to give sequences to pipelines, and tight where work can be divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.stage_arrays import stage_terms
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.assignment.bounds import Floats, Relaxation, relax, schedule_bound
from hydragraph.planner.assignment.problem import problem_of
from tests.planner.examples import pipelines, uneven


def relaxed(cost: list[list[float]], counts: list[int]) -> Relaxation:
    """Relax for pipelines that do z seconds of work by z; sequences in descending cost of the first kind."""
    table = np.array(sorted(cost, reverse=True), dtype=np.float64).reshape(len(cost), len(counts))
    many = np.array(counts, dtype=np.float64)
    start = float(np.where(np.isfinite(table), table, 0).sum()) + 1

    def capacity(z: float) -> Floats:
        return z * many

    return relax(table, capacity, start)


def best(cost: list[list[float]], counts: list[int]) -> float:
    """Try every way to give sequences to pipelines, one kind after another."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    found = np.inf
    for way in product(range(len(kinds)), repeat=len(cost)):
        loads = [0.0] * len(kinds)
        for row, pipeline in zip(cost, way, strict=True):
            loads[pipeline] += row[kinds[pipeline]]
        found = min(found, max(loads))
    return float(found)


Costs = st.lists(st.lists(st.integers(1, 20).map(float), min_size=2, max_size=2), min_size=1, max_size=5)


@settings(max_examples=max(12, settings.default.max_examples // 4))
@given(Costs, st.sampled_from([[1, 1], [2, 1]]))
def test_no_way_to_give_sequences_beats_it(cost: list[list[float]], counts: list[int]) -> None:
    found = relaxed(cost, counts)
    assert found.seconds <= best(cost, counts) * (1 + 1e-9)
    assert found.seconds > 0
    assert found.shares.sum(1) == pytest.approx(1)


def test_equal_pipelines_share_what_can_be_divided() -> None:
    assert relaxed([[2.0], [3.0], [4.0]], [3]).seconds == pytest.approx(3.0, rel=1e-3)


def test_each_kind_does_what_it_is_comparatively_good_at() -> None:
    # Both do their own kind of sequence in 1 s and the other's in 10: two of each take 2 s.
    found = relaxed([[1.0, 10.0], [10.0, 1.0]] * 2, [1, 1])
    assert found.seconds == pytest.approx(2.0, rel=1e-3)
    assert found.shares == pytest.approx(np.array([[0, 1], [0, 1], [1, 0], [1, 0]]), abs=1e-6)


def test_what_does_not_fit_a_kind_goes_elsewhere() -> None:
    found = relaxed([[np.inf, 3.0], [1.0, 1.0]], [1, 1])
    assert found.seconds <= 3.0
    assert found.shares[0] == pytest.approx([0, 1])


def test_of_three_sequences_two_share_one_of_two_pipelines() -> None:
    kind = PipelineCost(0.0, 1.0, 0.0, 1, 9, 1, 1)
    given = problem_of([kind, kind], [4, 3, 3], formed=True)
    assert schedule_bound(given, stage_terms([kind], 2), np.ones(1)) == pytest.approx(6.0, rel=1e-5)
    slow = replace(kind, b=7.0)  # too slow for any of them: the three share one
    given = problem_of([kind, slow], [4, 3, 3], formed=True)
    assert schedule_bound(given, stage_terms([kind, slow], 2), np.array([1.0, 0.0])) == pytest.approx(9.0, rel=1e-5)


@given(uneven(pipelines(most=3)), st.lists(st.integers(1, 2000), min_size=1, max_size=25), st.floats(0, 1))
@settings(max_examples=max(12, settings.default.max_examples // 16))
def test_no_plan_beats_the_bound_of_the_schedule_at_any_prices(
    kinds: tuple[PipelineCost, ...], sizes: list[int], tilt: float
) -> None:
    given_ = problem_of(kinds, sizes, formed=True)
    terms = stage_terms(given_.kinds, len(given_.lengths), lower=True)
    prices = np.linspace(tilt, 1.0, len(given_.kinds))
    assert schedule_bound(given_, terms, prices) <= assign_pipelines(kinds, sizes).seconds * (1 + 1e-9)


def test_kinds_that_cost_nothing_bound_nothing() -> None:
    quick = PipelineCost(0.0, 1.0, 0.0, 1, 9, 1, 1)
    slow = PipelineCost(0.0, 1.0, 0.0, 3, 9, 1, 1)  # its last stage ends after three times as long
    given_ = problem_of([quick, slow], [4], formed=True)
    terms = stage_terms(given_.kinds, len(given_.lengths), lower=True)
    for prices in ([0.0, 1.0], [1.0, 0.0], [1.0, 1.0]):
        found = schedule_bound(given_, terms, np.array(prices))
        assert found <= assign_pipelines([quick, slow], [4]).seconds * (1 + 1e-9)


def test_nothing_takes_no_time() -> None:
    assert relax(np.zeros((0, 2)), lambda z: np.array([z, z]), 1.0).seconds == 0.0


def test_the_example_of_the_module() -> None:
    relaxed = relax(np.array([[4.0, 6.0], [2.0, 8.0]]), lambda z: np.array([z, z]), 6.0)
    assert relaxed.seconds == pytest.approx(3.6)
    assert relaxed.shares == pytest.approx(np.array([[0.4, 0.6], [1.0, 0.0]]))

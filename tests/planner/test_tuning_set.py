"""A tuning set prices strategies as the quick plan of each mini-batch does."""

from __future__ import annotations

import numpy as np
import pytest

from hydragraph.planner.assignment.problem import problem_of
from hydragraph.planner.assignment.spread_search import longest_first, value
from hydragraph.planner.tuning_set import WORK, TuningSet
from tests.planner.examples import MIXED, PROFILE, lengths

BATCHES = [lengths(60, seed, 6000) for seed in range(3)]


@pytest.mark.parametrize("strategy", [tuple(MIXED), ((2, 1),) * 3, ((4, 2), (2, 2)), ((8, 1),)])
def test_seconds_are_those_of_the_quick_plan(strategy: tuple[tuple[int, int], ...]) -> None:
    tuning = TuningSet(PROFILE, BATCHES, 32)
    expected = []
    for batch in BATCHES:
        given = problem_of(PROFILE.pipelines(strategy), batch, formed=True)
        expected.append(value(given, longest_first(given)))
    assert tuning.computing(strategy) == pytest.approx(expected)
    charge = PROFILE.hetero_sync_s if len(set(strategy)) > 1 else 0.0
    assert tuning.seconds(strategy) == pytest.approx(np.array(expected) + charge)
    assert tuning.reach(strategy) == max(p.max_len for p in PROFILE.pipelines(strategy))


def test_what_a_strategy_cannot_take_is_infinite() -> None:
    short = ((1, 4), (1, 4))
    reach = PROFILE.max_len((1, 4), 8)
    tuning = TuningSet(PROFILE, [[reach, 5], [reach + 1, 5], [10**6], []], 8)
    assert np.isfinite(tuning.seconds(short)).tolist() == [True, False, False, True]
    assert tuning.seconds(short)[3] == 0.0
    assert tuning.longest == [reach, reach + 1, 10**6, 0]


def test_a_large_sample_is_cut_to_whole_mini_batches() -> None:
    assert TuningSet(PROFILE, [[1] * 10, [2] * 10, [3] * 10], WORK // 20).longest == [1, 2]
    assert TuningSet(PROFILE, [[1] * 10, [2] * 10], WORK).longest == [1]
    assert TuningSet(PROFILE, [], 8).longest == []

"""Improving candidates finds what looking at every strategy of a small world finds."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement

import pytest

from hydragraph import planner
from hydragraph.planner.refining import exchanges, seconds
from tests.planner.examples import PROFILE, lengths

BATCHES = [lengths(60, seed, 6000) for seed in range(2)]


def every(devices: int) -> list[tuple[tuple[int, int], ...]]:
    """Return all multisets of schemes that fit the devices."""
    schemes = [s for s in PROFILE.schemes if s[0] * s[1] <= devices and PROFILE.max_len(s, devices) > 0]
    found = (c for n in range(1, devices + 1) for c in combinations_with_replacement(schemes, n))
    return [c for c in found if sum(tp * pp for tp, pp in c) <= devices]


def test_it_ends_close_to_the_best_of_all_strategies() -> None:
    devices = 6
    flat = [n for batch in BATCHES for n in batch]
    start = planner.propose(PROFILE, flat, devices, 6000) + planner.homogeneous(PROFILE, devices)
    found = planner.refine(start, PROFILE, BATCHES, devices)
    best = min(seconds(s, PROFILE, BATCHES) for s in every(devices))
    assert seconds(tuple(found[0]), PROFILE, BATCHES) <= best * 1.02
    order = [seconds(tuple(s), PROFILE, BATCHES) for s in found]
    assert order == sorted(order)
    assert {tuple(sorted(s)) for s in start} <= {tuple(sorted(s)) for s in found}


@pytest.mark.parametrize("strategy", [((2, 1), (2, 1), (1, 1)), ((4, 1),), ((2, 2), (1, 2))])
def test_exchanges_fit_the_devices_and_leave_no_useless_room(strategy: tuple[tuple[int, int], ...]) -> None:
    found = list(exchanges(strategy, PROFILE, 6))
    assert found
    for changed in found:
        assert sum(tp * pp for tp, pp in changed) <= 6
        more, fewer = Counter(changed) - Counter(strategy), Counter(strategy) - Counter(changed)
        assert len(more) == 1
        assert len(fewer) <= 1


def test_homogeneous_strategies_fill_the_devices() -> None:
    for strategy in planner.homogeneous(PROFILE, 8):
        assert len(set(strategy)) == 1
        assert sum(tp * pp for tp, pp in strategy) == 8


def test_what_cannot_take_the_sample_comes_last() -> None:
    short = [(1, 4), (1, 4)]
    reach = PROFILE.max_len((1, 4), 8)
    found = planner.refine([short, [(8, 1)]], PROFILE, [[reach + 1]], 8)
    assert found[-1] == short
    assert seconds(tuple(short), PROFILE, [[reach + 1]]) == float("inf")

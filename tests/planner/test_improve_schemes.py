"""Improving candidates finds what looking at every strategy of a small world finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from hydragraph import planner
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.planner.improve_schemes import exchanges, groups
from hydragraph.planner.tuning_set import TuningSet
from tests.planner.examples import PROFILE, lengths

DEVICES = 6
LIMITS = {(1, 1): 900, (1, 2): 1500, (2, 1): 2500, (2, 2): 4000, (4, 1): 6000}
# MaxLen from 900 to 6,000, and little to pay for unequal pipelines: then many strategies are worth having
UNEVEN = Profile(
    "uneven", {s: PROFILE.schemes[s] for s in LIMITS}, PROFILE.util, None, limits=LIMITS, hetero_sync_s=0.01
)
BATCHES = [lengths(60, seed, longest) for seed, longest in enumerate((6000, 6000, 2400, 800, 1400, 850))]


def test_the_example_of_the_module() -> None:
    schemes = {scheme: PROFILE.schemes[scheme] for scheme in [(2, 1), (4, 1), (8, 1)]}
    found = exchanges(((4, 1), (4, 1)), replace(PROFILE, schemes=schemes), 8)
    assert set(found) == {((4, 1), (2, 1), (2, 1)), ((2, 1),) * 4, ((8, 1),)}


def every(profile: Profile, devices: int) -> list[tuple[Scheme, ...]]:
    """Return all multisets of schemes that fit the devices."""
    schemes = [s for s in profile.schemes if s[0] * s[1] <= devices and profile.max_len(s, devices) > 0]
    found = (
        tuple(sorted(c, reverse=True)) for n in range(1, devices + 1) for c in combinations_with_replacement(schemes, n)
    )
    return [c for c in found if sum(tp * pp for tp, pp in c) <= devices]


def refined(profile: Profile) -> tuple[list[list[Scheme]], list[list[Scheme]]]:
    flat = [n for batch in BATCHES for n in batch]
    starts = planner.propose(profile, flat, DEVICES, 6000) + planner.homogeneous(profile, DEVICES)
    return starts, planner.refine(starts, profile, BATCHES, DEVICES)


def table(profile: Profile, strategies: Sequence[Sequence[Scheme]]) -> np.ndarray:
    tuning = TuningSet(profile, BATCHES, DEVICES)
    return np.array([tuning.seconds(tuple(s)) for s in strategies])


@pytest.mark.parametrize("profile", [PROFILE, UNEVEN])
def test_the_first_is_close_to_the_best_static_strategy_of_all(profile: Profile) -> None:
    starts, found = refined(profile)
    totals = table(profile, found).sum(1)
    assert totals[0] == totals.min()
    assert totals[0] <= table(profile, every(profile, DEVICES)).sum(1).min() * 1.01
    assert {tuple(sorted(s)) for s in starts} <= {tuple(sorted(s)) for s in found}
    assert found == refined(profile)[1]


@pytest.mark.parametrize("profile", [PROFILE, UNEVEN])
def test_the_first_few_are_close_to_choosing_among_all(profile: Profile) -> None:
    _, found = refined(profile)
    dynamic = table(profile, every(profile, DEVICES)).min(0).sum()
    assert table(profile, found[:6]).min(0).sum() <= dynamic * 1.01
    # each of those that choosing gains from saves something, the second more than any other would
    running = np.minimum.accumulate(table(profile, found)).sum(1)
    second = np.minimum(table(profile, found)[0], table(profile, every(profile, DEVICES))).sum(1).min()
    assert running[1] <= second * 1.01


def test_short_mini_batches_get_a_strategy_that_does_not_take_the_longest() -> None:
    _, found = refined(UNEVEN)
    tuning = TuningSet(UNEVEN, BATCHES, DEVICES)
    assert tuning.reach(tuple(found[0])) >= max(tuning.longest)
    assert any(tuning.reach(tuple(s)) < max(tuning.longest) for s in found[1:4])


def test_the_first_takes_the_context_even_if_the_sample_does_not_need_it() -> None:
    alike = planner.homogeneous(UNEVEN, DEVICES)
    for context in (800, 2500, 6000):
        found = planner.refine(alike, UNEVEN, [lengths(60, 0, 800)], DEVICES, context=context)
        assert max(UNEVEN.max_len(s, DEVICES) for s in found[0]) >= context


def test_groups_are_the_mini_batches_that_the_same_schemes_take() -> None:
    tuning = TuningSet(UNEVEN, [[800], [6000], [900], [901, 5], [2600], [2500]], DEVICES)
    found = {tuple(group.tolist()): reach for group, reach in groups(tuning, UNEVEN, DEVICES)}
    assert found == {(0, 2): 900, (3,): 901, (5,): 2500, (4,): 2600}


@pytest.mark.parametrize("strategy", [((2, 1), (2, 1), (1, 1)), ((4, 1),), ((2, 2), (1, 2))])
def test_exchanges_fit_the_devices_and_leave_no_useless_room(strategy: tuple[tuple[int, int], ...]) -> None:
    found = list(exchanges(strategy, PROFILE, 6))
    assert found
    for changed in found:
        assert sum(tp * pp for tp, pp in changed) <= 6
        more, fewer = Counter(changed) - Counter(strategy), Counter(strategy) - Counter(changed)
        assert len(more) == 1
        assert len(fewer) <= 1


def test_homogeneous_strategies_leave_no_room_for_another_pipeline() -> None:
    found = planner.homogeneous(PROFILE, 13)
    assert {s[0] for s in found} == {s for s in PROFILE.schemes if s[0] * s[1] <= 13 and PROFILE.max_len(s, 13)}
    for strategy in found:
        assert len(set(strategy)) == 1
        used = sum(tp * pp for tp, pp in strategy)
        assert used <= 13 < used + strategy[0][0] * strategy[0][1]


def test_what_cannot_take_the_sample_comes_last() -> None:
    short = [(1, 4), (1, 4)]
    reach = PROFILE.max_len((1, 4), 8)
    found = planner.refine([short, [(8, 1)]], PROFILE, [[reach + 1]], 8)
    assert found[-1] == short
    assert planner.refine([short], PROFILE, [[10**6]], 8) == [short]
    assert planner.refine([short], PROFILE, [], 8)[0] == short

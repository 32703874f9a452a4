"""The candidate chosen is the one that assigning all of them finds."""

from __future__ import annotations

import math

import pytest

import hydragraph as hg
from hydragraph import planner
from tests.planner.examples import MIXED, PROFILE, lengths
from tests.thorough import only

CANDIDATES = [[(8, 2), (8, 1), (4, 2)], [(2, 2)] * 8, MIXED, [(8, 1)] * 4]


@only("2-900")
@pytest.mark.parametrize(("seed", "longest"), [(0, 16000), (1, 3000), (2, 900)])
def test_pruning_changes_nothing(seed: int, longest: int) -> None:
    sizes = lengths(60, seed, longest)
    chosen = planner.compare(CANDIDATES, PROFILE, sizes)
    index = chosen.index
    every = planner.compare(CANDIDATES, PROFILE, sizes, all_of_them=True)
    seconds = [v.seconds for v in every.verdicts]
    assert index == seconds.index(min(seconds))
    assert chosen.assignment.seconds + every.verdicts[index].charge == pytest.approx(min(seconds))
    assert every.index == index


def test_unequal_pipelines_pay_for_their_synchronisation() -> None:
    found = planner.compare(CANDIDATES, PROFILE, lengths(50, 0, 900), all_of_them=True)
    assert [v.charge for v in found.verdicts] == [0.3, 0.0, 0.3, 0.0]


def test_candidates_that_are_too_short_have_no_bound_and_none_is_an_error() -> None:
    reach = PROFILE.max_len((2, 2), 32)
    found = planner.compare(CANDIDATES, PROFILE, [reach + 1, 10])
    assert found.index != 1
    assert math.isinf(found.verdicts[1].bound)
    with pytest.raises(hg.Unsupported, match=r"sequence 1 has 9999999 tokens, more than any pipeline can hold"):
        planner.compare(CANDIDATES, PROFILE, [10, 9_999_999])
    with pytest.raises(ValueError, match="at least one strategy"):
        planner.compare([], PROFILE, [10])


def test_candidates_whose_state_does_not_fit_say_so() -> None:
    with pytest.raises(hg.Unsupported, match=r"the state fills the memory of every pipeline.*add pipelines"):
        planner.compare([[(1, 1)]], PROFILE, [100])

"""Choice of the machines to drop if some do not reach each other, without any network."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cluster.failure.time_limits import CUT_S
from hydragraph.cluster.supervision.broken_links import HEALED_S, MachineLinks, Pair, look, smaller_side

LOOK_S = 0.25
TWO_EACH = {1: 2, 2: 2, 3: 2}


def after(links: MachineLinks, seconds: float, broken: list[Pair], ranks: dict[int, int] = TWO_EACH) -> MachineLinks:
    for _ in range(round(seconds / LOOK_S)):
        links = look(links, LOOK_S, broken, ranks)
    return links


@pytest.mark.parametrize("pair", combinations((1, 2, 3), 2))
def test_one_machine_of_a_broken_pair_is_dropped_in_time_and_returns(pair: Pair) -> None:
    links = after(MachineLinks(), CUT_S - LOOK_S, [pair])
    assert not links.dropped, "a link may be back after 3 s, which takes TCP up to 6"
    links = after(links, LOOK_S, [pair])
    assert links.dropped == {pair[1]: pair[0]}
    links = after(links, 60, [pair])
    assert links.dropped == {pair[1]: pair[0]}
    assert after(links, HEALED_S - LOOK_S, []).dropped == links.dropped
    assert not after(links, HEALED_S, []).dropped


@pytest.mark.parametrize("pair", combinations((1, 2, 3), 2))
def test_the_machine_with_fewer_ranks_is_dropped(pair: Pair) -> None:
    assert after(MachineLinks(), CUT_S, [pair], TWO_EACH | {pair[0]: 1}).dropped == {pair[0]: pair[1]}


def test_a_link_that_comes_back_drops_nothing() -> None:
    links = MachineLinks()
    for _ in range(10):
        links = after(after(links, 5, [(1, 2)]), LOOK_S, [])
    assert not links.dropped


def test_of_two_groups_the_smaller_one_is_dropped_even_if_its_links_are_reported_one_by_one() -> None:
    links = after(MachineLinks(), 1, [(1, 3)])
    assert after(links, CUT_S - 1, [(1, 2), (1, 3)]).dropped == {1: 2}
    across = [(low, high) for low in (1, 2, 3) for high in (4, 5)]
    ranks = dict.fromkeys(range(1, 6), 1)
    assert smaller_side(across, ranks).keys() == {4, 5}
    assert smaller_side(across, ranks | {4: 8}).keys() == {1, 2, 3}


def test_a_dropped_machine_returns_while_another_is_dropped() -> None:
    links = after(MachineLinks(), CUT_S, [(1, 3), (2, 3)])
    assert links.dropped.keys() == {3}
    links = after(links, CUT_S, [(1, 2), (1, 3), (2, 3)])
    assert links.dropped.keys() == {2, 3}
    assert after(links, HEALED_S, [(2, 3)]).dropped.keys() == {3}, "only one of two that do not reach each other"


@given(
    st.sets(st.sampled_from(list(combinations(range(1, 6), 2)))),
    st.dictionaries(st.integers(1, 5), st.integers(0, 8)),
)
def test_no_broken_pair_is_left_and_every_dropped_machine_was_in_one(broken: set[Pair], ranks: dict[int, int]) -> None:
    dropped = smaller_side(broken, ranks)
    assert not [pair for pair in broken if dropped.keys().isdisjoint(pair)]
    assert all((min(pair), max(pair)) in broken for pair in dropped.items())

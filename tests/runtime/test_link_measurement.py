"""Links that are measured, over two gloo ranks in two pretended nodes; and network cards counted from messages."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.runtime.link_measurement import MeasuredLinks, cards_of, measure_links


def measured() -> tuple[MeasuredLinks, MeasuredLinks]:
    groups = Groups(join("cpu"), timedelta(minutes=2))
    found = measure_links(groups, ["a", "a"]), measure_links(groups, ["a", "b"])
    groups.close()
    return found


def test_pairs_within_and_between_nodes_are_measured() -> None:
    for one, two in launch(measured, 2, timeout=timedelta(minutes=5)):
        assert one.inner[0] is not None
        assert one.inner[0].bytes_per_s > 0
        assert (one.outer, one.cards) == ((None,), (1,))
        assert two.inner == (None, None)
        assert all(link is not None and link.bytes_per_s > 0 for link in two.outer)
        assert two.messages[0][0] == 1024
        assert all(seconds > 0 for _, seconds in two.messages)


def test_a_single_rank_has_no_links() -> None:
    groups = Groups(join("cpu"), timedelta(minutes=2))
    assert measure_links(groups, ["a"]) == MeasuredLinks((None,), (None,), (1,))
    groups.close()


@pytest.mark.parametrize(
    ("ranks", "pairs", "slowdown", "cards"),
    [(4, 4, 1.05, 4), (4, 4, 4.1, 1), (4, 4, 1.9, 2), (8, 1, 1.0, 1), (2, 2, 9.0, 1)],
)
def test_pairs_that_slow_each_other_share_a_card(ranks: int, pairs: int, slowdown: float, cards: int) -> None:
    assert cards_of(ranks, pairs, 1.0, slowdown) == cards

"""Links that are measured, over two gloo ranks in two pretended nodes; and network cards counted from messages."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.runtime.link_measurement import MeasuredLinks, cards_of, link_of, measure_links


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


def test_a_link_of_constant_speed_is_found_again() -> None:
    messages = tuple((4**n, 3e-4 + 4**n / 1e8) for n in range(5, 13))
    link = link_of(messages)
    for size, seconds in messages:
        assert link.seconds(size) == pytest.approx(seconds, rel=0.05)


def test_a_burst_that_a_link_lets_through_is_not_its_bandwidth() -> None:
    """As measured on a link of 25 MB/s that tc shapes: what fits its bucket arrives at once."""
    milliseconds = {1024: 0.23, 4096: 0.28, 16384: 0.26, 65536: 1.35, 262144: 7.43, 1048576: 40.34, 4194304: 172.2}
    link = link_of(tuple((size, each / 1e3) for size, each in milliseconds.items()))
    assert link.bytes_per_s == pytest.approx(24.4e6, rel=0.01)
    assert link.latency_s == pytest.approx(0.23e-3)


def test_a_link_that_latency_hides_has_a_bandwidth() -> None:
    assert link_of(((1024, 1e-3), (4096, 9e-4))).bytes_per_s == pytest.approx(4096 / 9e-5)

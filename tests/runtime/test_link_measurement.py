"""Links that are measured, over two gloo ranks in two pretended nodes; and network cards counted from messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.runtime import link_measurement
from hydragraph.runtime.link_measurement import (
    ROUNDS,
    SIZES,
    MeasuredLinks,
    Messages,
    Pair,
    cards_of,
    link_of,
    measure_links,
    one_way,
    tournament,
)
from tests.nodes import TwoNodes, shaping_refusal, torchrun
from tests.thorough import thorough


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
    assert measure_links(groups, ["a"]) == MeasuredLinks((None,), (None,), (None,), (1,))
    groups.close()


class Pretended:
    """A network of nodes with one rank each, and the pairs that exchanged messages at the same time."""

    def __init__(self, sends: Sequence[float], receives: Sequence[float]) -> None:
        self.sends, self.receives = sends, receives  # bytes/s
        self.rounds: list[list[Pair]] = []

    def exchange(self, groups: object, pairs: Sequence[Pair]) -> dict[Pair, Messages]:
        if pairs:
            self.rounds.append(list(pairs))
        ways = [way for pair in pairs for way in (pair, pair[::-1])]
        rates = {(a, b): min(self.sends[a], self.receives[b]) for a, b in ways}
        return {way: tuple((size, 1e-4 + size / rate) for size in SIZES) for way, rate in rates.items()}

    def measured(self) -> MeasuredLinks:
        with mock.patch.object(link_measurement, "exchange", self.exchange):
            return measure_links(mock.Mock(), [f"node{n}" for n in range(len(self.sends))])


def test_a_slow_direction_of_one_node_is_seen() -> None:
    found = Pretended(sends=[1e9, 1e9, 2e7, 1e9], receives=[1e9] * 4).measured()
    out, into = ([link.bytes_per_s for link in links if link] for links in (found.outbound, found.inbound))
    assert out == pytest.approx([1e9, 1e9, 2e7, 1e9], rel=1e-3)
    assert into == pytest.approx([1e9] * 4, rel=1e-3)
    assert [link.bytes_per_s for link in found.outer if link] == pytest.approx([1e9, 1e9, 2e7, 1e9], rel=1e-3)


@pytest.mark.parametrize("nodes", [2, 3, 7, 40])
def test_all_nodes_are_measured_in_few_rounds(nodes: int) -> None:
    pretended = Pretended([1e9] * nodes, [1e9] * nodes)
    found = pretended.measured()
    assert all(link is not None for link in (*found.outbound, *found.inbound))
    assert len(pretended.rounds) <= ROUNDS
    for pairs in pretended.rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy)) >= nodes - 1


@pytest.mark.parametrize("players", [1, 2, 5, 8])
def test_each_pair_meets_once(players: int) -> None:
    every = [pair for pairs in tournament(players) for pair in pairs]
    assert sorted(every) == list(combinations(range(players), 2))


def test_the_answer_does_not_count() -> None:
    assert one_way(2e-4, []) == pytest.approx(1e-4)
    assert one_way(5e-3, [(1024, 1e-4), (4096, 2e-4)]) == pytest.approx(4.9e-3)


@thorough
def test_a_link_that_is_slow_in_one_direction(tmp_path: Path) -> None:
    if (why := shaping_refusal()) is not None:
        pytest.skip(why)
    with TwoNodes(tmp_path / "nodes") as nodes:
        nodes.shape(80e6, [nodes[1]])
        started = []
        for node in nodes:
            command = [*torchrun(node, nodes, 1), "-m", "hydragraph", "devices", "--device", "cpu"]
            started.append(node.start(command, tmp_path / f"{node.number}.log", COLUMNS="200"))
        assert [process.wait(240) for process in started] == [0, 0], (tmp_path / "0.log").read_text()
    said = (tmp_path / "0.log").read_text()
    speeds = {way: float(rate) for way, rate in re.findall(r"^((?:from|to) node [01]): ([\d.e-]+) GB/s", said, re.M)}
    assert speeds["from node 1"] == speeds["to node 0"] == pytest.approx(0.01, rel=0.15)
    assert speeds["from node 0"] == speeds["to node 1"] > 0.1


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

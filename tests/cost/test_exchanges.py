"""Messages of exchanges: pairs of ranks, or rings where all send equally much to all."""

from __future__ import annotations

import numpy as np
import pytest

from hydragraph.cost.exchanges import transfers
from hydragraph.cost.traffic import RankLinks
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node


def cluster(nodes: int, devices: int, cards: int) -> Cluster:
    node = Node("t", devices, Interconnect(100.0, 0.0), Interconnect(10.0, 0.0), nodes, cards)
    return Cluster.of({"t": DeviceType(1.0, 1, 1.0)}, (node,))


def even(ranks: int, elements: int) -> np.ndarray:
    return elements * (1 - np.eye(ranks, dtype=np.int64))


@pytest.mark.parametrize(("nodes", "devices", "cards"), [(2, 4, 4), (3, 2, 1), (4, 1, 1)])
def test_a_collective_enters_each_node_once(nodes: int, devices: int, cards: int) -> None:
    where, ranks = cluster(nodes, devices, cards), nodes * devices
    moved = transfers(even(ranks, 6), 2.0, where)
    assert moved.total == pytest.approx(12.0 * ranks * (ranks - 1))  # each rank receives all but its own part
    entering = dict.fromkeys(range(nodes), 0.0)
    for (source, target), size in moved.pairs.items():
        if where.node_of(source) != where.node_of(target):
            entering[where.node_of(target)] += size
    assert all(size == pytest.approx(12.0 * (ranks - 1)) for size in entering.values())
    seconds = RankLinks(where, np.arange(ranks)).slowest_s(moved)
    assert seconds == pytest.approx(12.0 * (ranks - 1) * (1 / 10 / cards + (1 - 1 / cards) / 100), rel=0.01)


def test_other_exchanges_and_those_within_a_node_are_pairs() -> None:
    uneven = even(4, 6)
    uneven[0, 1] = 7
    assert transfers(uneven, 1.0, cluster(2, 2, 2)).pairs[0, 1] == 7.0
    assert len(transfers(uneven, 1.0, cluster(2, 2, 2))) == 12
    assert len(transfers(even(4, 6), 1.0, cluster(1, 4, 4))) == 12
    assert not len(transfers(0 * even(4, 6), 1.0, cluster(2, 2, 2)))

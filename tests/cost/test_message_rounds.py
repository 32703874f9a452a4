"""Messages that begin together, against their sums rank by rank and card by card."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.traffic import RankLinks, Transfers
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node

KNEE = ((1e3, 1e8), (1e5, 1e9), (1e6, 8e8))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    types = {name: DeviceType(1e12, 1 << 30, 1e11) for name in ("a", "b")}
    inner = st.sampled_from((Interconnect(1e10, 1e-6), Interconnect(2e10, 3e-6, KNEE)))
    outer = st.sampled_from((Interconnect(1e9, 1e-5), Interconnect(5e8, 2e-5, KNEE[:2])))
    nodes = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        cards = draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0]))
        nodes.append(Node(draw(st.sampled_from("ab")), size, draw(inner), draw(outer), cards=cards))
    return Cluster.of(types, tuple(nodes))


@given(st.data(), clusters())
def test_the_slowest_rank_is_that_of_the_sums(data: st.DataObject, cluster: Cluster) -> None:
    ranks = range(len(cluster.devices))
    every = [(a, b) for a in ranks for b in ranks if a != b]
    sizes = st.sampled_from((0.0, 10.0, 1e3, 3e4, 1e5, 4e6))
    pairs = {pair: data.draw(sizes) for pair in every}
    handling = np.array([data.draw(st.sampled_from((1.0, 2.5))) for _ in ranks])
    roads = RankLinks(cluster, np.array(ranks), handling)
    assert roads.slowest_s(Transfers.of(pairs)) == pytest.approx(slowest(cluster, pairs, handling.tolist()), rel=1e-12)


def slowest(cluster: Cluster, pairs: dict[tuple[int, int], float], handling: list[float]) -> float:
    """Say the same from what the module promises, pair by pair."""
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    leave: dict[object, float] = defaultdict(float)
    enter: dict[object, float] = defaultdict(float)
    nodes = [device.node for device in cluster.devices]
    cards = [(nodes[rank], cluster.card_of(rank)) for rank in range(len(nodes))]
    real = {pair: size for pair, size in pairs.items() if size > 0}
    links = {(a, b): cluster.link(a, b) for a, b in real}
    # The quickest that anything goes over links between such nodes says how much of a card a message fills.
    quickest: dict[object, float] = defaultdict(float)
    kinds = {(a, b): (cluster.node(nodes[a]), cluster.node(nodes[b]), nodes[a] != nodes[b]) for a, b in real}
    for pair, size in real.items():
        quickest[kinds[pair]] = max(quickest[kinds[pair]], links[pair].bytes_per_s, links[pair].bandwidth(size))
    latency = {(a, b): links[a, b].latency_s * max(handling[a], handling[b]) for a, b in real}
    for (a, b), size in real.items():
        alone = latency[a, b] + size / links[a, b].bandwidth(size)
        sent[a] += alone
        received[b] += alone
        if nodes[a] != nodes[b]:
            leave[cards[a]] += size / quickest[kinds[a, b]]
            enter[cards[b]] += size / quickest[kinds[a, b]]
    shared = [max(leave[cards[a]], enter[cards[b]]) + latency[a, b] for a, b in real if nodes[a] != nodes[b]]
    return max([*sent.values(), *received.values(), *shared], default=0.0)

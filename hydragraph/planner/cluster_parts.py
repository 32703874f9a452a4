"""Plans on fewer nodes, where sending takes longer than computing: a cluster's best plan may leave most of it idle.

A search that is given all devices uses most of them, and `finalists` leaves pipelines out one node after the other. So
the best plan of one node of four may never be seen. Here some sets of nodes are looked at as if there were no others:

    nodes, quickest first   A A A B            (of two kinds)
    the first 1, 2, 4, ...  A | A A
    the first of some kinds A A A
    all but one kind        B

A set is worth a look only where the time that nobody can beat, all devices computing, would on its devices alone still
be less than what was found: so wherever computing takes most of the time, none is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hydragraph.cost.costs import Costs
from hydragraph.spec.health import Health


def with_fewer(costs: Costs) -> Iterator[tuple[Costs, float]]:
    """Yield costs in which some nodes are lost, and which part of all power is left.

    Args:
        costs: nodes in the order of planning, the quickest first (`ordering`).
    """
    powers: dict[int, float] = {}
    for rank, device in enumerate(costs.cluster.devices):
        powers.setdefault(device.node, 0.0)
        powers[device.node] += device.flops_per_s / costs.health.rate(rank)
    nodes = [node for node, power in powers.items() if power > 0]
    for kept in dict.fromkeys(_sets(costs, nodes)):
        yield _only(costs, kept), sum(powers[node] for node in kept) / sum(powers.values())


def _sets(costs: Costs, nodes: list[int]) -> Iterator[frozenset[int]]:
    """Yield sets of nodes, none of them all."""
    kinds: dict[object, list[int]] = {}
    for node in nodes:
        kinds.setdefault(_kind(costs, node), []).append(node)
    ends = [1 << i for i in range(len(nodes).bit_length())]
    ends += [nodes.index(each[-1]) + 1 for each in kinds.values()]
    for count in sorted(set(ends)):
        if count < len(nodes):
            yield frozenset(nodes[:count])
    for alike in kinds.values():
        if len(alike) < len(nodes):
            yield frozenset(nodes).difference(alike)


def _kind(costs: Costs, node: int) -> object:
    """Return what tells a node from others: how it is built, and its devices as they are today."""
    built = costs.cluster.node(node)
    devices = [
        (costs.cluster.type_of(rank), device.memory_bytes, costs.health.rate(rank))
        for rank, device in enumerate(costs.cluster.devices)
        if device.node == node
    ]
    return built.inner, built.outer, built.cards, tuple(sorted(devices))


def _only(costs: Costs, kept: frozenset[int]) -> Costs:
    """Return costs in which all other nodes are lost."""
    rates = {
        rank: costs.health.rate(rank) if device.node in kept else math.inf
        for rank, device in enumerate(costs.cluster.devices)
    }
    return costs.changed(health=Health(rates))

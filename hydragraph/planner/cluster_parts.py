"""Subsets of a cluster's nodes, which can be faster than all nodes if communication dominates.

Example with nodes of kinds A and B, the fastest first:

all nodes               A A A B
the first 1, 2, 4, ...  A | A A
all of the first kinds  A A A
all but one kind        B
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from hydragraph.cost.costs import Costs
from hydragraph.spec.health import Health


def with_fewer(costs: Costs) -> Iterator[tuple[Costs, float]]:
    """Yield `Costs` for subsets of nodes, and each subset's fraction of all computing power."""
    powers: dict[int, float] = defaultdict(float)
    for rank, device in enumerate(costs.cluster.devices):
        powers[device.node] += device.flops_per_s / costs.health.rate(rank)
    nodes = [node for node, power in powers.items() if power > 0]
    for kept in dict.fromkeys(_sets(costs, nodes)):
        yield _only(costs, kept), sum(powers[node] for node in kept) / sum(powers.values())


def _sets(costs: Costs, nodes: list[int]) -> Iterator[frozenset[int]]:
    kinds: dict[object, list[int]] = defaultdict(list)
    for node in nodes:
        kinds[kind_of(costs, node)].append(node)
    ends = [1 << i for i in range(len(nodes).bit_length())]
    ends += [nodes.index(kind_nodes[-1]) + 1 for kind_nodes in kinds.values()]
    for count in sorted(set(ends)):
        if count < len(nodes):
            yield frozenset(nodes[:count])
    for alike in kinds.values():
        if len(alike) < len(nodes):
            yield frozenset(nodes).difference(alike)


def kind_of(costs: Costs, node: int) -> object:
    built = costs.cluster.node(node)
    devices = [
        (costs.cluster.type_of(rank), costs.cluster.devices[rank].memory_bytes, costs.health.rate(rank))
        for rank in costs.cluster.ranks_by_node[node]
    ]
    return built.inner, built.outer, built.cards, tuple(sorted(devices))


def _only(costs: Costs, kept: frozenset[int]) -> Costs:
    rates = {
        rank: costs.health.rate(rank) if device.node in kept else math.inf
        for rank, device in enumerate(costs.cluster.devices)
    }
    return costs.changed(health=Health(rates))

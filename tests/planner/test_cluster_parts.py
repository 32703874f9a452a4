"""Plans on fewer nodes, where sending takes longer than computing."""

from __future__ import annotations

import math

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.cluster_parts import with_fewer
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from tests.cost import priced
from tests.thorough import first, thorough

TYPES = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}


def costs_of(nodes: list[tuple[str, int]], bytes_per_s: float = 1e6, health: hg.Health | None = None) -> Costs:
    """Return costs of these (type, devices) nodes, with links of `bytes_per_s` between them."""
    outer = Interconnect(bytes_per_s, 1e-5)
    every = tuple(Node(name, count, priced.FAST, outer, cards=1) for name, count in nodes)
    return priced.costs(8, Cluster.of({name: TYPES[name] for name, _ in nodes}, every), health)


def kept(costs: Costs) -> list[set[int]]:
    """Return the nodes that are not lost, of each that is yielded."""
    return [
        {costs.cluster.node_of(rank) for rank in range(costs.ranks) if math.isfinite(some.health.rate(rank))}
        for some, _ in with_fewer(costs)
    ]


def test_the_example_of_the_module() -> None:
    assert kept(costs_of([("fast", 2), ("fast", 2), ("fast", 2), ("slow", 2)])) == [{0}, {0, 1}, {0, 1, 2}, {3}]


def test_parts_of_all_power_are_of_the_devices_that_are_left() -> None:
    costs = costs_of([("fast", 1), ("slow", 1), ("slow", 1)], health=hg.Health({1: 2.0, 2: math.inf}))
    parts = [part for _, part in with_fewer(costs)]
    power = {rank: costs.cluster.devices[rank].flops_per_s for rank in (0, 1)}
    total = power[0] + power[1] / 2
    assert parts == pytest.approx([power[0] / total, power[1] / 2 / total])
    assert all(math.isinf(some.health.rate(2)) for some, _ in with_fewer(costs)), "what is lost stays so"


@thorough
@pytest.mark.parametrize("nodes", [[("fast", 3), ("fast", 1), ("slow", 2)], [("slow", 2), ("fast", 2), ("fast", 4)]])
@pytest.mark.parametrize("bytes_per_s", first([1e6], [1e6, 1e8]))
def test_no_node_makes_a_plan_slower(nodes: list[tuple[str, int]], bytes_per_s: float) -> None:
    work = hg.Workload(sequences=8, length=50)
    costs = costs_of(nodes, bytes_per_s)
    plan = hg.plan(costs, work)
    for node in range(len(nodes)):
        lost = {rank: math.inf for rank in range(costs.ranks) if costs.cluster.node_of(rank) == node}
        without = hg.plan(costs.changed(health=hg.Health(lost)), work)
        assert plan.seconds <= 1.005 * without.seconds, node

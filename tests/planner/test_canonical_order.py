"""Planning does not depend on how nodes and devices are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.canonical_order import order_of
from hydragraph.spec.cluster import Cluster, Device, DeviceType, Node
from hydragraph.spec.home import Home
from tests.cost import priced
from tests.thorough import first, thorough

TYPES = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}


def costs_of(
    nodes: Sequence[tuple[str, tuple[float, ...]]], home: Home | None = None, cards: int | None = None
) -> Costs:
    """Return costs of nodes of a type, with the rates of their devices."""
    every = [Node(name, len(rates), priced.FAST, priced.SLOW, cards=cards or len(rates)) for name, rates in nodes]
    cluster = Cluster.of({node.type: TYPES[node.type] for node in every}, tuple(every))
    rates = [rate for _, each in nodes for rate in each]
    return priced.costs(6, cluster, hg.Health(dict(enumerate(rates))), elements=100_000, home=home)


def test_the_quickest_come_first_and_devices_of_a_node_stay_together() -> None:
    given = costs_of([("slow", (1.0, 1.0)), ("fast", (3.0, 1.0)), ("fast", (2.0, 1.0))])
    assert order_of(given) == [5, 4, 3, 2, 0, 1]
    assert order_of(given.reordered(order_of(given))) == list(range(6))


def test_unlike_devices_of_a_node_are_told_apart() -> None:
    fast, slow = (Device(flops, 10**9, 1e12, 0, name) for name, flops in (("fast", 1e15), ("slow", 4e14)))
    cluster = Cluster((slow, fast, replace(slow, node=1), replace(fast, node=1)), priced.FAST, priced.SLOW)
    assert order_of(priced.costs(2, cluster, hg.Health({1: 3.0}))) == [3, 2, 1, 0]


def test_who_shares_a_network_card_stays_so() -> None:
    given = costs_of([("fast", (1.0, 9.0, 1.0, 2.0))], cards=2)
    order = order_of(given)
    assert order == [2, 3, 0, 1]
    ordered = given.reordered(order)
    pairs = [{order[rank] for rank in range(4) if ordered.cluster.card_of(rank) == card} for card in range(2)]
    assert pairs == [{2, 3}, {0, 1}]


def test_who_owns_what_and_its_nodes_are_told_as_they_were_given() -> None:
    rates = [("slow", (1.0, 1.0)), ("fast", (1.0, 1.0))]
    given = costs_of(rates, Home(copies=2, nodes=(0, 0, 1, 1)))
    plan = hg.plan(given, hg.Workload(sequences=8, length=700), streaming=False)
    assert plan.home.copies == 2
    assert plan.home.nodes == (0, 0, 1, 1)
    owned = given.changed(home=plan.home)
    assert plan.seconds == pytest.approx(owned.simulate(plan.strategy, plan.assignment).seconds)


@thorough
@pytest.mark.parametrize("varying", first([False], [False, True]))
def test_plans_are_as_quick_however_nodes_and_devices_are_listed(varying: bool) -> None:
    nodes = [("fast", (1.0, 1.0)), ("slow", (1.0, 1.0, 1.0)), ("fast", (2.57, 1.0)), ("slow", (1.0,))]
    work = hg.Workload(lengths=[[900, *[100] * 20]]) if varying else hg.Workload(sequences=20, length=700)
    plans = []
    for listed in (nodes, nodes[::-1], [(name, rates[::-1]) for name, rates in nodes]):
        given = costs_of(listed)
        plan = hg.plan(given, work)
        owned = given.changed(home=plan.home)
        assert plan.seconds == pytest.approx(owned.simulate(plan.strategy, plan.assignment).seconds)
        least = [min(pipeline.devices) for pipeline in plan.strategy.pipelines]
        assert least == sorted(least)
        plans.append(plan)
    shapes = [sorted(tuple((s.layers, s.kind) for s in p.stages) for p in plan.strategy.pipelines) for plan in plans]
    assert shapes[0] == shapes[1] == shapes[2]
    assert [plan.seconds for plan in plans] == pytest.approx([plans[0].seconds] * 3, rel=0.01)


@thorough
def test_planning_again_for_a_rank_that_became_slow_moves_about_what_its_node_owns() -> None:
    nodes = [("fast", (1.0,) * 4)] * 4
    work = hg.Workload(sequences=32, length=700)
    plan = hg.plan(costs_of(nodes), work)
    slow = costs_of(nodes).changed(health=hg.Health({2: 3.0}))
    again = hg.plan(slow, work, running=plan)
    everything = 12 * sum(bucket.size for bucket in slow.buckets)  # weights and two moments in fp32
    assert again.strategy != plan.strategy
    assert again.moved_bytes <= everything / 4

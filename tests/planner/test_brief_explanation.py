"""The few lines on a plan, on made-up devices."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.planner.brief_explanation import brief_explanation, devices_line
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from tests.cost import priced

WORK = hg.Workload(lengths=[[64] * 8, [90, 17, 200, 33]])


def test_a_plan_for_devices_that_differ_says_why_the_usual_ones_lose() -> None:
    costs = priced.costs(4, priced.mixed())
    plan = hg.plan(costs, WORK, streaming=False)
    lines = brief_explanation(costs, WORK, plan)
    assert lines[0].startswith(f"plan: {plan.strategy.name}: ")
    assert f"expected: {plan.seconds:.3g} s per step; tightest memory: rank" in lines[1]
    assert [line.partition(": ")[0] for line in lines[2:]] == [
        "plain data parallelism",
        "plain tensor parallelism",
        "fastest alternative with identical pipelines",
    ]
    causes = ("is the plan", "takes the same time", "(mostly ", "more memory")
    assert all(any(cause in line for cause in causes) for line in lines[2:])
    assert any("longer (mostly " in line for line in lines[2:])


@pytest.mark.parametrize(
    ("devices", "tensor_parallelism"),
    [
        ((1, 1), "no node has two equal devices"),
        ((2, 1), "only degree 1 divides the nodes' device counts (1, 2)"),
    ],
)
def test_a_plan_names_uneven_shares_and_beats_equal_ones(devices: tuple[int, int], tensor_parallelism: str) -> None:
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}
    nodes = tuple(Node(name, n, priced.FAST, priced.SLOW, cards=n) for name, n in zip(types, devices, strict=True))
    costs = priced.costs(4, Cluster.of(types, nodes))
    work = hg.Workload(sequences=40, length=64)
    plan = hg.plan(costs, work, streaming=False)
    lines = brief_explanation(costs, work, plan)
    assert re.search(r"1 fast: 4 layers, \d\d% of tokens\].* \[1 slow: 4 layers, \d\d% of tokens\]", lines[0])
    assert re.search(r"^plain data parallelism: .* with equal shares takes \d\d% longer \(mostly imbalance\)", lines[2])
    assert lines[3] == f"plain tensor parallelism: cannot run: {tensor_parallelism}"
    own = replace(plan, home=hg.Home(shares=(3.0,) + (1.0,) * (costs.ranks - 1)))
    assert f"% of tokens, {3 / (costs.ranks + 2):.0%} of the state]" in brief_explanation(costs, work, own)[0]


def test_what_does_not_fit_loses_by_its_memory() -> None:
    costs = priced.costs(4, priced.cluster(4), elements=1_000_000)
    work = hg.Workload(sequences=8, length=64)
    plan = hg.plan(costs, work, streaming=False)
    small = tuple(replace(device, memory_bytes=int(1.2 * max(plan.memory))) for device in costs.cluster.devices)
    pooled = costs.changed(cluster=replace(costs.cluster, devices=small))
    found = hg.plan(pooled, work)
    tiny = tuple(replace(device, memory_bytes=max(found.memory) // 2) for device in costs.cluster.devices)
    lines = brief_explanation(costs.changed(cluster=replace(costs.cluster, devices=tiny)), work, found)
    assert any("does not fit: rank" in line and line.endswith("more memory") for line in lines)


def test_devices_are_counted_by_type() -> None:
    costs = priced.costs(4, priced.mixed())
    names = [costs.cluster.type_of(rank) for rank in range(4)]
    assert devices_line(costs, names, ", 1 GB/s between nodes") == (
        "devices: 2 x fast (1e+06 GFLOP/s, 1 GB), 2 x slow (4e+05 GFLOP/s, 1 GB) on 2 nodes, 1 GB/s between nodes"
    )

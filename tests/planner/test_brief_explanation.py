"""The few lines on a plan, on made-up devices."""

from __future__ import annotations

from dataclasses import replace

import hydragraph as hg
from hydragraph.planner.brief_explanation import brief_explanation, devices_line
from tests.cost import priced

WORK = hg.Workload(lengths=[[64] * 8, [90, 17, 200, 33]])


def test_a_plan_for_devices_that_differ_says_why_the_usual_ones_lose() -> None:
    costs = priced.costs(4, priced.mixed())
    plan = hg.plan(costs, WORK)
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


def test_what_does_not_fit_loses_by_its_memory() -> None:
    costs = priced.costs(4, priced.cluster(4), elements=1_000_000)
    work = hg.Workload(sequences=8, length=64)
    plan = hg.plan(costs, work)
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

"""Data parallelism that streams: memory as walked in full, no kind of stage that is faster, and plans that need it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.price_candidate import PricedPlan, Shortage, held, owners
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.planner.streamed_data_parallelism import streamed, streaming_fits
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from tests.cost import priced
from tests.thorough import only

LENGTH = 1000
WORKLOAD = hg.Workload(sequences=8, length=LENGTH)


def costs_of(memory: float = 1e9, layers: int = 8, ranks: int = 4, per_node: int | None = None) -> Costs:
    """Return costs of fast devices, whose recomputing stages save only their inputs."""
    profile = priced.that_saves(priced.profile(layers, "fast", elements=2_000_000))
    outer = Interconnect(1e11, 1e-6)
    return with_memory(Costs(profile, priced.cluster(ranks, per_node, outer=outer)), memory)


def with_memory(costs: Costs, *sizes: float) -> Costs:
    """Return costs of devices with this memory each; the last size counts for all further devices."""
    every = [*sizes, *sizes[-1:] * costs.ranks][: costs.ranks]
    devices = tuple(replace(d, memory_bytes=int(m)) for d, m in zip(costs.cluster.devices, every, strict=True))
    return costs.changed(cluster=replace(costs.cluster, devices=devices))


@settings(max_examples=max(5, settings.default.max_examples // 160))
@given(
    st.sampled_from(["4*<tp1,pp1>w", "4*<tp1,pp1>rg", "2*<tp2,pp1>g", "<tp1,pp2>w + 2*<tp1,pp1>g", "<tp2,pp2>w"]),
    st.integers(1, 7),
    st.lists(st.integers(100, 3000), min_size=4, max_size=4),
    st.floats(0.9, 2.5),
)
def test_memory_is_that_of_the_whole_iteration(text: str, count: int, tokens: list[int], tight: float) -> None:
    rich = costs_of(layers=2)
    strategy = hg.Strategy.parse(text, 2)
    pipelines = len(strategy.pipelines)
    assignment = Assignment.even([count] * pipelines, tokens[:pipelines])
    most = max(each.total for each in rich.memory(strategy, assignment))
    costs = with_memory(rich, tight * most, 2 * most)
    found = owners(costs, strategy, assignment)
    if isinstance(found, Shortage):
        assert tight < 1.1
        return
    home, memory = found
    walked = [each.total for each in costs.changed(home=home).memory(strategy, assignment)]
    # Later micro-batches need no more, but a plan must also fit where a mini-batch has more of them.
    assert all(a >= b * (1 - 1e-6) for a, b in zip(memory, walked, strict=True))
    if count > 5:
        assert memory == pytest.approx(walked, rel=0.01)
    assert all(size <= costs.memory_of(rank) for rank, size in enumerate(memory))
    # Other mini-batches may give a pipeline what an equal one has in this one.
    assert all(a >= b for a, b in zip(held(costs, strategy, home, [assignment]), memory, strict=True))


@only("2-400000000.0")
@pytest.mark.parametrize("memory", [150e6, 220e6, 400e6])
@pytest.mark.parametrize("per_node", [None, 2])
def test_no_other_strategy_of_one_stage_that_streams_is_faster(memory: float, per_node: int | None) -> None:
    costs = costs_of(memory, per_node=per_node)
    found = [each for each in streamed(costs, WORKLOAD, math.inf, None) if isinstance(each, PricedPlan)]
    others = []
    for text in ("4*<tp1,pp1>", "2*<tp2,pp1>", "<tp4,pp1>"):
        for flags in ("g", "w", "rg", "rw"):
            try:
                strategy = hg.Strategy.parse(text + flags, 8)
            except ValueError:
                continue
            if any(
                costs.cluster.node_of(s.devices[0]) != costs.cluster.node_of(s.devices[-1]) for s in stages(strategy)
            ):
                continue
            one = MiniBatchPrices(costs, WORKLOAD.batches).settle(strategy, "oracle")
            if isinstance(one, PricedPlan) and math.isfinite(one.seconds):
                others.append(one.seconds)
    best = min((each.seconds for each in found), default=math.inf)
    assert best == pytest.approx(min(others, default=math.inf), rel=0.01)
    for each in found:
        simulation = hg.simulate(costs.changed(home=each.home), each.strategy, each.assignments[0])
        assert each.seconds == pytest.approx(simulation.seconds)


def stages(strategy: hg.Strategy) -> list[hg.Stage]:
    return [stage for pipeline in strategy.pipelines for stage in pipeline.stages]


def test_what_others_need_decides() -> None:
    costs = costs_of(400e6)
    fastest = min(each.seconds for each in streamed(costs, WORKLOAD, math.inf, None) if isinstance(each, PricedPlan))
    assert not any(isinstance(each, PricedPlan) for each in streamed(costs, WORKLOAD, 0.5 * fastest, None))
    assert streamed(costs, WORKLOAD, 2 * fastest, until=0.0) == []
    late = streamed(costs, WORKLOAD, math.inf, until=0.0)
    assert any(isinstance(each, PricedPlan) for each in late), "a first plan is found after the deadline too"


@functools.cache
def least_that_streams() -> tuple[Costs, float]:
    """Return costs of one layer, whose weights and gradients no stage holds, and the memory that streaming needs."""
    rich = Costs(priced.that_saves(priced.profile(1, "fast", elements=20_000_000)), priced.cluster(4))
    size = 8e7  # of the state alone
    while not streaming_fits(with_memory(rich, size), LENGTH):
        size *= 1.08
    return rich, size


@pytest.mark.parametrize("lengths", [None, [[1000, 900, 300, 200, 200, 100], [600] * 4]])
def test_plans_stream_where_nothing_else_fits(lengths: list[list[int]] | None) -> None:
    workload = WORKLOAD if lengths is None else hg.Workload(lengths=lengths)
    rich, size = least_that_streams()
    costs = with_memory(rich, size)
    with pytest.raises(Unsupported, match="nothing fits"):
        hg.plan(costs, workload, streaming=False)
    found = hg.plan(costs, workload)
    assert found.strategy.streams
    assert all(held <= limit for held, limit in zip(found.memory, found.limits, strict=True))
    assert "streaming" in found.explain()
    with pytest.raises(Unsupported, match="nothing fits"):
        hg.plan(with_memory(rich, 0.9 * size), workload)


def test_plans_stream_where_that_is_faster_and_not_where_it_gains_nothing() -> None:
    tight, roomy = (costs_of(memory, layers=4, per_node=1) for memory in (300e6, 400e6))
    found = hg.plan(tight, WORKLOAD)
    without = hg.plan(tight, WORKLOAD, streaming=False)
    assert found.strategy.streams
    assert not without.strategy.streams
    assert found.seconds < 0.9 * without.seconds
    assert hg.plan(roomy, WORKLOAD).strategy.name == "4*<tp1,pp1>"


def test_pipelines_without_work_are_left_out() -> None:
    costs = costs_of(layers=2, ranks=6, per_node=1)
    found = streamed(costs, hg.Workload(sequences=2, length=LENGTH), math.inf, None)
    assert found
    assert [len(each.strategy.pipelines) for each in found if isinstance(each, PricedPlan)] == [2] * len(found)

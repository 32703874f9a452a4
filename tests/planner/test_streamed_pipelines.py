"""Pipelines whose stages stream: found where nothing else fits, as fast as simulated, and within memory."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner import plan as planning
from hydragraph.planner.price_candidate import PricedPlan, Shortage
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.planner.streamed_data_parallelism import streamed
from hydragraph.planner.streamed_pipelines import _balanced, owned_pipelines
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.health import Health
from hydragraph.spec.pipeline import GRADIENTS
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.thorough import first

WORKLOAD = hg.Workload(sequences=8, length=1000)
STREAMS = (GRADIENTS, True)
LAYERS = 8


def costs_of(*memory: float) -> Costs:
    """Return costs of two nodes of two devices, whose link is slow; memory is of each node's devices."""
    profile = priced.that_saves(priced.profile(LAYERS, "fast", elements=2_000_000))
    costs = Costs(profile, priced.cluster(4, 2, outer=Interconnect(1e9, 1e-5)))
    devices = tuple(replace(d, memory_bytes=int(memory[d.node])) for d in costs.cluster.devices)
    return costs.changed(cluster=replace(costs.cluster, devices=devices))


@functools.cache
def every(*memory: float) -> list[PricedPlan | Shortage]:
    return owned_pipelines(costs_of(*memory), WORKLOAD, math.inf, None, streams=STREAMS)


def test_stages_stream_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_tight", lambda costs: False)  # else stages own their layers, and fit
    costs = costs_of(240e6, 168e6)
    with pytest.raises(Unsupported, match="nothing fits"):
        hg.plan(costs, WORKLOAD, streaming=False)
    found = hg.plan(costs, WORKLOAD)
    alone = [one.seconds for one in streamed(costs, WORKLOAD, math.inf, None) if isinstance(one, PricedPlan)]
    assert found.strategy.streams
    assert any(len(pipeline.stages) > 1 for pipeline in found.strategy.pipelines)
    assert found.seconds < min(alone, default=math.inf)
    owned = costs.changed(home=found.home)
    assert found.seconds == pytest.approx(hg.simulate(owned, found.strategy, found.assignment).seconds)
    walked = [each.total for each in owned.memory(found.strategy, found.assignment)]
    assert all(size <= costs.memory_of(rank) for rank, size in enumerate(walked))


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_stages_that_own_their_layers_fit_without_streaming(share: float) -> None:
    costs = costs_of(share * 240e6, share * 168e6)
    found = hg.plan(costs, WORKLOAD, streaming=False)
    assert hg.plan(costs, WORKLOAD).seconds <= found.seconds
    owned = costs.changed(home=found.home)
    assert found.seconds == pytest.approx(hg.simulate(owned, found.strategy, found.assignment).seconds)
    walked = [each.total for each in owned.memory(found.strategy, found.assignment)]
    assert all(size <= costs.memory_of(rank) for rank, size in enumerate(walked))


def test_owned_pipelines_that_take_longer_than_a_known_plan_are_left_out() -> None:
    costs = costs_of(240e6, 168e6)
    every_owned = owned_pipelines(costs, WORKLOAD, math.inf, None)
    best = min(one.seconds for one in every_owned if isinstance(one, PricedPlan))
    assert owned_pipelines(costs, WORKLOAD, 0.01 * best, None) == []
    assert owned_pipelines(costs, WORKLOAD, 1e9, until=0.0) == []


def test_larger_devices_hold_more_layers() -> None:
    equal, uneven = (every(240e6, size) for size in (240e6, 168e6))
    assert {tuple(s.layers for s in p.stages) for one in equal for p in one.strategy.pipelines} <= {(4, 4), (2,) * 4}
    assert {tuple(s.layers for s in p.stages) for one in uneven for p in one.strategy.pipelines} == {(5, 3)}


def test_what_takes_longer_than_a_known_plan_is_left_out() -> None:
    costs = costs_of(240e6, 168e6)
    found = [one.seconds for one in every(240e6, 168e6) if isinstance(one, PricedPlan)]
    assert found
    assert owned_pipelines(costs, WORKLOAD, 0.01 * min(found), None, streams=STREAMS) == []
    assert owned_pipelines(costs, WORKLOAD, 1e9, until=0.0, streams=STREAMS) == []


@pytest.mark.parametrize(("devices", "layers"), first([(7, 2)], [(7, 2), (5, 4)]))
def test_groups_that_no_depth_divides_form_pipelines_of_equal_depth(devices: int, layers: int) -> None:
    costs = priced.costs(layers, priced.cluster(devices))
    found = owned_pipelines(costs, WORKLOAD, math.inf, None, streams=STREAMS)
    assert found
    for one in found:
        assert {pipeline.layers for pipeline in one.strategy.pipelines} == {layers}
        assert len({len(pipeline.stages) for pipeline in one.strategy.pipelines}) == 1


@pytest.mark.parametrize(("slower", "working"), [(1.3, 4), (30.0, 2)])
def test_stages_take_nearly_equal_times_and_much_slower_devices_stay_idle(slower: float, working: int) -> None:
    costs = costs_of(1e9, 1e9).changed(health=Health({2: slower, 3: slower}))
    workload = hg.Workload(sequences=32, length=1000)
    found = {s: seconds for s, seconds in _balanced(costs, workload).items() if len(s.pipelines) == 1}
    best = min(found, key=found.__getitem__)
    varied = MiniBatchPrices(costs, workload.batches)

    def seconds(strategy: Strategy) -> float:
        settled = varied.settle(strategy, "owned")
        return settled.seconds if isinstance(settled, PricedPlan) else math.inf

    # every: all ways to divide the layers over the first two devices, and over all four
    ends = itertools.combinations(range(1, LAYERS), 3)
    every = [f"<[0]x{a},[1]x{b - a},[2]x{c - b},[3]x{LAYERS - c}>" for a, b, c in ends]
    every += [f"<[0]x{a},[1]x{LAYERS - a}>" for a in range(1, LAYERS)]
    least = min(seconds(Strategy.parse(text, LAYERS)) for text in every)
    assert len(best.devices) == working
    assert seconds(best) <= 1.02 * least
    assert seconds(best) == pytest.approx(found[best], rel=0.1)

"""Refinements fit, are faster, and are found where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.micro_batch_sizes import cut
from hydragraph.planner.price_candidate import PricedPlan, settle, simulated
from hydragraph.planner.refinements import as_run, interleaved, refined
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.stage_kind import BUDGETS, StageKind
from tests.cost import priced
from tests.thorough import first

LENGTH = 1000
WORKLOAD = hg.Workload(sequences=8, length=LENGTH)


def costs_of(layers: int = 8) -> Costs:
    """Return costs of four devices, whose recomputing stages save only their inputs."""
    return with_memory(Costs(priced.that_saves(priced.profile(layers, "fast")), priced.cluster(4)), 1e9)


def with_memory(costs: Costs, size: float) -> Costs:
    devices = tuple(replace(device, memory_bytes=int(size)) for device in costs.cluster.devices)
    return costs.changed(cluster=replace(costs.cluster, devices=devices))


def plan_of(costs: Costs, text: str, micro_batches: int = 8, length: int = LENGTH) -> PricedPlan:
    strategy = hg.Strategy.parse(text, costs.outline.layers)
    assignment = Assignment.even([micro_batches] * len(strategy.pipelines), [length] * len(strategy.pipelines))
    found = settle(costs, strategy, assignment, "search", 1.0)
    assert isinstance(found, PricedPlan)
    return simulated(costs, found)


def most(costs: Costs, text: str) -> float:
    return max(plan_of(costs, text).memory) / 0.99


@pytest.mark.parametrize("part", first([0.05, 0.4], [0.05, 0.4, 0.9]))
def test_stages_recompute_as_little_as_their_memory_allows(part: float) -> None:
    rich = costs_of()
    least, enough = most(rich, "<tp1,pp4>r"), most(rich, "<tp1,pp4>")
    costs = with_memory(rich, least + part * (enough - least))
    before = plan_of(costs, "<tp1,pp4>r")
    found = [plan for plan in refined(costs, [before]) if plan.origin == before.origin]
    after = next((plan for plan in found if plan.strategy.schedule == "1f1b"), before)
    assert after.seconds <= before.seconds
    assert max(after.memory) <= 0.99 * costs.memory_of(0)
    budgets = [stage.recompute for stage in after.strategy.pipelines[0].stages]
    assert set(budgets) <= {True, *BUDGETS}
    # Later stages hold fewer micro-batches, so they have room for larger budgets.
    sizes = [0.0 if budget is True else budget for budget in budgets]
    assert sizes == sorted(sizes)
    assert (after.seconds < before.seconds) == (after.strategy != before.strategy)
    if part > 0.3:
        assert after.seconds < before.seconds


def test_plain_data_parallelism_stays_as_it_is() -> None:
    costs = costs_of()
    assert refined(costs, [plan_of(costs, "4*<tp1,pp1>")]) == []


def test_bubbles_are_filled_where_that_is_faster() -> None:
    costs = costs_of(layers=4)
    before = plan_of(costs, "<tp1,pp2>", micro_batches=2)
    found = refined(costs, [before], ("1f1b", "zb-h1"))
    assert "zb-h1" in {plan.strategy.schedule for plan in found}
    assert all(plan.strategy.schedule == "1f1b" for plan in refined(costs, [before]))
    for plan in found:
        assert plan.seconds < before.seconds
        assert plan.seconds == pytest.approx(simulated(costs, plan).seconds)


def test_devices_run_several_stages_where_that_is_faster() -> None:
    costs = costs_of()
    before = plan_of(costs, "<tp1,pp4>", micro_batches=8)
    found = refined(costs, [before])
    assert [plan.strategy.name for plan in found] == ["<tp1,pp4,v2>"]
    (after,) = found
    assert after.seconds < 0.95 * before.seconds
    owned = costs.changed(home=after.home)
    assert after.seconds == pytest.approx(owned.simulate(after.strategy, after.assignments[0]).seconds)
    exact = [memory.total for memory in owned.memory(after.strategy, after.assignments[0])]
    assert max(size / most for size, most in zip(exact, after.memory, strict=True)) <= 1.01
    # It holds more micro-batches than the plan, whose memory is full.
    tight = with_memory(costs, max(before.memory) / 0.99)
    assert refined(tight, [plan_of(tight, "<tp1,pp4>", micro_batches=8)]) == []


@pytest.mark.parametrize(
    ("text", "visits", "expected"),
    [
        ("<tp1,pp2>", 2, "<tp1,pp2,v2>"),
        ("<[0]x5sr,[1]x3> + <[2]x8>", 2, "<[0]x3sr,[1]x1,[0]x2sr,[1]x2> + <tp1,pp1>"),
        # A device with a single layer runs one stage: the first one of the model's first device, else the last.
        ("<[4]x1,[0]x4,[2]x3>", 2, "<[4]x1,[0]x2,[2]x1,[0]x2,[2]x2>"),
        ("<[0]x7,[1]x1>", 2, None),
        ("8*<tp1,pp1>", 2, None),
        ("<tp1,pp2,v2>", 2, None),
        ("<[0]x4,[4]x4> + <[1]x4,[4]x4>", 2, None),
    ],
)
def test_layers_are_cut_into_turns(text: str, visits: int, expected: str | None) -> None:
    found = interleaved(hg.Strategy.parse(text, 8), visits)
    assert (found and found.name) == expected


@pytest.mark.parametrize(("faster", "interleaves"), [(0.96, True), (0.9, False)])
def test_the_second_plan_is_interleaved_too_if_it_takes_hardly_longer(faster: float, interleaves: bool) -> None:
    costs = costs_of()
    pipeline = plan_of(costs, "<tp1,pp4>", micro_batches=8)
    first = replace(plan_of(costs, "4*<tp1,pp1>"), by_batch=(faster * pipeline.seconds,))
    found = [plan.strategy.interleaved for plan in refined(costs, [first, pipeline])]
    assert any(found) == interleaves


def test_sums_run_in_pieces_where_products_hide_more_than_the_latencies_cost() -> None:
    profile = priced.profile(8, "fast")
    pieces = {
        kind: {**of, "layer": replace(of["layer"], reduced=(2, 2), before_sums=(1e-9,) * 4)}
        for kind, of in profile.pieces.items()
    }
    costs = Costs(replace(profile, pieces=pieces), priced.cluster(4))
    before = plan_of(costs, "2*<tp2,pp1>")
    (after,) = refined(costs, [before])
    assert after.strategy.name == "2*<tp2,pp1>p"
    owned = costs.changed(home=after.home)
    simulated_s = [owned.simulate(plan.strategy, plan.assignments[0]).seconds for plan in (before, after)]
    assert after.seconds == pytest.approx(simulated_s[1])
    # One of the two pieces of each sum is hidden, in 8 micro-batches and 8 layers.
    piece_s = 2 * (priced.FAST.latency_s + LENGTH * priced.HIDDEN / 4 / priced.FAST.bytes_per_s)
    latency_s = 2 * priced.FAST.latency_s
    assert simulated_s[0] - simulated_s[1] == pytest.approx(8 * 8 * 4 * (piece_s - latency_s))
    assert refined(costs, [before], in_pieces=False) == []
    assert refined(costs, [plan_of(costs, "2*<tp2,pp1>", length=10)]) == []


def test_no_time_is_spent_after_the_deadline() -> None:
    costs = costs_of()
    before = plan_of(costs, "<tp1,pp4>r")
    assert refined(costs, [before], until=0.0) == []


@pytest.mark.parametrize("faster", [0.9, 1.1])
def test_plans_sum_in_pieces_where_that_was_measured_as_faster(faster: float) -> None:
    profile = priced.profile(8, "fast")
    of = profile.pieces[StageKind(2)]
    layer = replace(of["layer"], forward=of["layer"].forward.times(faster))
    pieces = {StageKind(2): of, StageKind(2, sums_in_pieces=True): {**of, "layer": layer}}
    found = hg.plan(Costs(replace(profile, pieces=pieces), priced.cluster(4)), WORKLOAD, streaming=False)
    stages = [stage for pipeline in found.strategy.pipelines for stage in pipeline.stages]
    assert {stage.sums_in_pieces for stage in stages} == {faster < 1}


def test_plans_propose_budgets() -> None:
    profile = priced.that_saves(priced.profile(8, "fast"))
    alone = replace(profile, pieces={kind: of for kind, of in profile.pieces.items() if kind.tp == 1})
    found = []
    for memory in (9_000_000, 11_000_000, 18_000_000):
        costs = with_memory(Costs(alone, priced.cluster(4)), memory)
        found.append(hg.plan(costs, WORKLOAD, streaming=False))
        assert max(found[-1].memory) <= memory
    stages = [stage for plan in found for pipeline in plan.strategy.pipelines for stage in pipeline.stages]
    assert any(stage.recompute in BUDGETS for stage in stages), [plan.strategy.name for plan in found]
    assert [plan.seconds for plan in found] == sorted([plan.seconds for plan in found], reverse=True)


def test_a_plan_gets_the_micro_batches_of_a_run() -> None:
    costs = costs_of()
    even = plan_of(costs, "2*<tp1,pp2>")
    lopsided = Assignment((((0, 1, 2), (3,)), tuple((i,) for i in range(4, 16))), (LENGTH,) * 16)
    after = as_run(costs, simulated(costs, replace(even, assignments=(lopsided,))))
    owned = costs.changed(home=after.home)
    formed = cut(owned, after.strategy, (LENGTH,) * 16)[0]
    assert after.assignments == (formed,)
    assert after.seconds == pytest.approx(owned.simulate(after.strategy, formed).seconds)
    assert as_run(costs, after) is after


def test_pipelines_without_micro_batches_are_omitted() -> None:
    costs = costs_of()
    one = plan_of(costs, "2*<tp1,pp1>", micro_batches=1)
    alone = as_run(costs, replace(one, assignments=(Assignment(((), ((0,),)), (LENGTH,)),)))
    assert len(alone.strategy.pipelines) == len(alone.assignments[0].micro_batches) == 1

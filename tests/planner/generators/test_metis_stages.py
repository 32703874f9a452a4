from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.rank_memory import MemoryWalk
from hydragraph.errors import Unsupported
from hydragraph.planner import metis
from hydragraph.planner.generators.metis_stages import TypedDevices, laid_out, pipelines_of, staged
from hydragraph.planner.metis import Cluster, DeviceType, Found, Order, Plan, Problem
from hydragraph.spec import cluster as spec
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.planner.metis.literal import draw
from tests.thorough import only

ORDERS: tuple[Order, ...] = ("naive", "memory", "exact")


def check(costs: Costs, sequences: int, order: Order) -> None:
    """Look at every promise of every plan."""
    plans = staged(costs, sequences, 256, order)
    assert plans
    for plan in plans:
        pipelines = plan.strategy.pipelines
        lost = {rank for rank in range(costs.ranks) if math.isinf(costs.health.rate(rank))}
        used = {rank for pipeline in pipelines for rank in pipeline.devices}
        assert used == set(range(costs.ranks)) - lost
        assert all(pipeline.layers == costs.outline.layers for pipeline in pipelines)
        assert all(
            len({costs.cluster.node_of(rank) for rank in stage.devices}) == 1
            for pipeline in pipelines
            for stage in pipeline.stages
        )
        assigned = sorted(i for batches in plan.assignment.micro_batches for batch in batches for i in batch)
        assert assigned == list(range(sequences))


@pytest.mark.parametrize("order", ORDERS)
def test_plans_keep_their_promises(order: Order) -> None:
    check(priced.costs(6, priced.mixed()), 8, order)


def test_stragglers_lost_devices_and_odd_numbers() -> None:
    check(priced.costs(6, priced.mixed(), Health({1: 3.0})), 8, "memory")
    check(priced.costs(5, priced.cluster(4, 2)), 6, "memory")
    check(priced.costs(5, priced.mixed(), Health({3: math.inf})), 8, "exact")


def test_only_plans_with_shared_stages_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "fixed", lambda *_: pytest.fail("a simulation"))
    monkeypatch.setattr(MemoryWalk, "__init__", lambda *_, **__: pytest.fail("a walk"))
    costs = priced.costs(6, priced.mixed())
    plans = staged(costs, 8, 256, "exact")
    for plan in plans:
        if not plan.strategy.shares:
            assert plan.assignment is not None
            assert plan.seconds == costs.pipelines_end(plan.strategy, plan.assignment)
    assert plans


def scarce(elements: int, memory: int) -> Costs:
    """Return costs of devices whose memory does not hold the whole model."""
    types = {"fast": spec.DeviceType(1e15, memory, 1e12), "slow": spec.DeviceType(4e14, memory, 1e12)}
    nodes = tuple(spec.Node(name, 2, priced.FAST, priced.SLOW, cards=2) for name in types)
    small = []
    for name, slower in (("fast", 1.0), ("slow", 2.5)):
        profile = priced.profile(6, name, slower, elements)
        assert profile.device is not None
        small.append(replace(profile, device=replace(profile.device, memory=float(memory))))
    return Costs(Profile.merge(small), spec.Cluster.of(types, nodes))


def test_where_memory_is_short_stages_are_cut() -> None:
    wide = staged(scarce(1_000_000, 10**9), 8, 256, "memory")[0].strategy
    assert {stage.tp for pipeline in wide.pipelines for stage in pipeline.stages} == {1}
    assert len(wide.pipelines[0].stages) == 1
    cut = staged(scarce(1_000_000, 160 * 10**6), 8, 256, "memory")[0]
    assert any(stage.tp > 1 or len(p.stages) > 1 for p in cut.strategy.pipelines for stage in p.stages)
    with pytest.raises(Unsupported, match="in stages of 1, 2, 4"):
        staged(scarce(1_000_000, 50 * 10**6), 8, 256, "exact")


def test_slower_devices_get_fewer_sequences_or_layers() -> None:
    best = staged(priced.costs(6, priced.mixed()), 12, 256, "exact")[0]
    fast, slow = 0.0, 0.0
    for pipeline, batches in zip(best.strategy.pipelines, best.assignment.micro_batches, strict=True):
        for stage in pipeline.stages:
            work = stage.layers * sum(map(len, batches)) / stage.tp
            fast += work * (stage.devices[0] < 2)
            slow += work * (stage.devices[0] >= 2)
    assert fast > 1.5 * slow


def test_the_example_of_the_module() -> None:
    cluster = Cluster({"fast": DeviceType(1, 1)}, (("fast", 8),))
    profile = next(p.profile for p in map(draw, range(40)) if p.layers == 6)
    plan = Plan(("fast",), (4, 4), ((4, 1), (2, 2)), 1, (2, 4), Problem(profile, cluster, 8, 4))
    assert Strategy(pipelines_of(plan, list(range(8)))).name == (
        "<[0]x2,[4,5]x4> + <[1]x2,[4,5]x4> + <[2]x2,[6,7]x4> + <[3]x2,[6,7]x4>"
    )


def test_stages_of_different_degrees_are_laid_out_over_all_sequences() -> None:
    costs = priced.costs(6, priced.mixed())
    devices = TypedDevices(costs)
    profile = next(p.profile for p in map(draw, range(40)) if p.layers == 6)
    cluster = Cluster({"fast": DeviceType(1, 1), "slow": DeviceType(1, 1)}, devices.cluster.nodes)
    measured = {key: each for kind in ("fast", "slow") for key, each in _of(profile, kind).items()}
    problem = Problem(replace(profile, measurements=measured), cluster, 8, 4)
    found = Found(
        ("slow", "fast"), (2, 2), ((2, 1), (1, 2)), 2, (2, 4), problem, cost=1.0, steps=0
    )  # the slow ones first
    plan = laid_out(costs, devices, found, 256, recompute=False)
    assert plan is not None
    assert plan.assignment is not None
    assert plan.strategy.name == "<[2]x2,[0,1]x4> + <[3]x2,[0,1]x4>"
    assert plan.assignment.counts == (2, 2)
    assert [len(batch) for batches in plan.assignment.micro_batches for batch in batches] == [2] * 4
    assert plan.seconds == costs.simulate(plan.strategy, plan.assignment).seconds


def _of(profile: metis.Profile, kind: str) -> dict[tuple[str, int, int], metis.Measurement]:
    return {(kind, tp, size): each for (_, tp, size), each in profile.measurements.items()}


def test_an_equal_degree_is_a_strategy_of_its_own() -> None:
    cluster = Cluster({"fast": DeviceType(1, 1)}, (("fast", 6),))
    profile = next(p.profile for p in map(draw, range(40)) if p.layers == 6)
    plan = Plan(("fast",), (4, 2), ((2, 2), (2, 1)), 1, (5, 1), Problem(profile, cluster, 8, 4))
    ranks = [5, 4, 3, 2, 1, 0]
    assert Strategy(pipelines_of(plan, ranks, recompute=True)).name == "<[5,4]x5r,[1]x1r> + <[3,2]x5r,[0]x1r>"


def test_too_many_kinds_of_devices_are_refused() -> None:
    health = Health({rank: 2.0 + rank for rank in range(6)})
    with pytest.raises(Unsupported, match="the devices have 7 combinations of type and rate"):
        staged(priced.costs(5, priced.cluster(8), health), 8, 256)


@only("8")
@pytest.mark.parametrize("rank", range(0, 12, 2))
def test_groups_stay_in_nodes_wherever_one_of_them_is_broken(rank: int) -> None:
    """After a node with an odd number of equal devices, groups of two would span two nodes."""
    nodes = (spec.Node("fast", 2, priced.FAST, spec.Interconnect(1e8, 1e-5), count=6),)
    cluster = spec.Cluster.of({"fast": spec.DeviceType(1e15, 10**9, 1e12)}, nodes)
    found = [
        staged(priced.costs(6, cluster, Health({each: 1.6})), 7, 700, "exact")[0]
        for each in (rank, len(cluster.devices) - 1)
    ]
    for each in found:
        groups = [stage.devices for pipeline in each.strategy.pipelines for stage in pipeline.stages if stage.tp > 1]
        assert all(len({cluster.node_of(device) for device in group}) == 1 for group in groups)
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-3)

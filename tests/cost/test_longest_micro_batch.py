from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.rank_memory import MemoryWalk
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.thorough import thorough

LAYERS = 14


def costs_of(memory: tuple[int, int], home: Home | None = None) -> Costs:
    """Return costs of sixteen ranks in two nodes, with this much memory per device."""
    types = {name: DeviceType(1e15, each, 1e12) for name, each in zip(("fast", "slow"), memory, strict=True)}
    nodes = tuple(Node(name, 8, priced.FAST, priced.SLOW, cards=8) for name in types)
    return priced.costs(LAYERS, Cluster.of(types, nodes), elements=10**6, home=home)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Draw pipelines on ranks of both nodes in any order."""
    count = draw(st.integers(2, 7))
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=count - 1, max_size=count - 1)))
    layers = [b - a for a, b in zip((0, *cuts), (*cuts, LAYERS), strict=True)]
    nodes = [list(range(8)), list(range(8, 16))]
    stages = []
    for each in layers:
        tp = draw(st.sampled_from([1, 2]))
        able = [node for node in nodes if len(node) >= tp]
        node = draw(st.sampled_from(able))
        stages.append(Stage(tuple(node.pop(0) for _ in range(tp)), each, recompute=draw(st.booleans())))
    return Pipeline(tuple(stages))


@thorough
@given(
    pipeline=pipelines(),
    memory=st.tuples(st.integers(4 * 10**8, 10**9), st.integers(4 * 10**8, 10**9)),
    uneven=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_stages_that_are_left_out_never_decide(pipeline: Pipeline, memory: tuple[int, int], uneven: bool) -> None:
    home = Home(shares=tuple(1 + rank % 3 for rank in range(16))) if uneven else None
    costs = costs_of(memory, home)
    alone = []
    for at, stage in enumerate(pipeline.stages):
        for rank in stage.devices:
            peak = costs._longest._stage_peak(pipeline, at, rank)
            alone.append(peak.most(costs.memory_of(rank) - costs.owned_bytes(rank)))
    assert costs.max_len(pipeline) == min(alone)


def test_few_stages_of_a_deep_pipeline_are_walked() -> None:
    costs = costs_of((10**9, 10**9))
    walked = []
    begin = MemoryWalk.__init__

    def counted(walk: MemoryWalk, *args: object, **options: object) -> None:
        walked.append(args[3])
        begin(walk, *args, **options)  # pyrefly: ignore[bad-argument-type]

    with patch.object(MemoryWalk, "__init__", counted):
        assert costs.max_len(Strategy.parse("<tp1,pp7>", LAYERS).pipelines[0]) > 0
        assert walked == [0, 1, 6], "the first, one between, the last"
        assert costs.changed(health=hg.Health({2: 3.0})).max_len(Strategy.parse("<tp1,pp7>", LAYERS).pipelines[0]) > 0
        assert len(walked) == 3, "who is slow is not in it"


def test_other_types_of_as_many_ranks_are_walked_anew() -> None:
    """Graphs of one type of device may hold more than those of another."""
    fast, slow = (priced.profile(6, name) for name in ("fast", "slow"))
    pieces = {}
    for kind, each in slow.pieces.items():
        layer = each["layer"]
        assert layer.held is not None
        pieces[kind] = {**each, "layer": replace(layer, held=replace(layer.held, saved=(64.0, 9000.0)))}
    profile = Profile.merge([fast, replace(slow, pieces=pieces)])
    types = {name: DeviceType(1e15, 10**9, 1e12) for name in ("fast", "slow")}
    here, there = (Cluster.of({n: types[n]}, (Node(n, 2, priced.FAST, priced.SLOW, cards=2),)) for n in types)
    pipeline = Strategy.parse("<tp1,pp2>", 6).pipelines[0]
    costs = Costs(profile, here)
    longest = costs.max_len(pipeline)
    assert costs.changed(cluster=there).max_len(pipeline) == Costs(profile, there).max_len(pipeline) < longest / 4


def test_more_layers_or_less_memory_behind_are_looked_at() -> None:
    costs = costs_of((10**9, 3 * 10**8))
    even = Strategy.parse("<[0]x2,[1]x2,[2]x2,[3]x2,[4]x2,[5]x2,[6]x2>", LAYERS).pipelines[0]
    longer = Strategy.parse("<[0]x1,[1]x1,[2]x1,[3]x1,[4]x1,[5]x8,[6]x1>", LAYERS).pipelines[0]
    smaller = Strategy.parse("<[0]x2,[1]x2,[2]x2,[3]x2,[4]x2,[8]x2,[6]x2>", LAYERS).pipelines[0]
    positions = [list(costs._longest._deciding(each)) for each in (even, longer, smaller)]
    assert positions == [[(0, 0), (1, 1), (6, 6)], [(0, 0), (1, 1), (5, 5), (6, 6)], [(0, 0), (1, 1), (5, 8), (6, 6)]]
    assert costs.max_len(smaller) < costs.max_len(even)


def test_only_an_owner_that_alone_pushes_needs_no_room_for_gradients() -> None:
    both = Strategy.parse("2*<tp1,pp1>", 4)
    for home in (Home((1.0, 0.0)), Home((0.0, 1.0))):
        costs = priced.costs(4, priced.cluster(2), elements=3 * 10**6, home=home)
        batches = [[MicroBatch(cost.max_len, 1)] for cost in costs.pipelines(both)]
        for rank in range(2):
            peak = costs.walk(both, batches, rank, messages=False).peak().total
            assert 0.8 * costs.memory_of(rank) < peak <= costs.memory_of(rank), (home, rank)


def test_peaks_of_another_home_are_walked_anew() -> None:
    where = priced.cluster(2)
    pipeline = Strategy.parse("<[1]x4>", 4).pipelines[0]
    costs = priced.costs(4, where, elements=10**6, home=Home((0.0, 1.0)))
    costs.max_len(pipeline)
    for home in (Home((1.0, 0.0)), Home()):
        fresh = priced.costs(4, where, elements=10**6, home=home).max_len(pipeline)
        assert costs.changed(home=home).max_len(pipeline) == fresh

"""A few micro-batches suffice to find the needs of stages, and pipelines end when their costs say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.pricing import micro_batches_of
from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.planner.price_candidate import form_of, needs, owners_by_block, share_out
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.strategy import Strategy
from tests.cost import priced

ROUNDED = 1e-4  # further micro-batches also add the ids of their tokens
STRATEGIES = (
    *("<[0]x6>", "<[0]x2,[1]x4>", "<[0]x1,[1]x2,[2]x3>", "<[0]x1,[1]x2,[2]x2,[3]x1>", "<[0,1]x3,[2]x3>"),
    "<[0]x1,[1]x1,[2]x2,[3]x1,[4]x1>",
)


@settings(max_examples=max(8, settings.default.max_examples // 50))
@given(st.sampled_from(STRATEGIES), st.sampled_from(("1f1b", "gpipe", "zb-h1")), st.integers(1, 12))
def test_few_micro_batches_tell_what_a_stage_holds(text: str, schedule: str, count: int) -> None:
    costs = priced.costs(6, priced.cluster(5, 1))
    strategy = Strategy(Strategy.parse(text, 6).pipelines, schedule)
    (pipeline,) = strategy.pipelines
    assignment = Assignment((tuple((i,) for i in range(count)),), (700,) * count)
    found = needs(costs, strategy, assignment)
    # A run must be able to fill the pipeline with such micro-batches.
    full = count if schedule == "gpipe" else max(count, len(pipeline.stages) + 2)
    filled = Assignment((tuple((i,) for i in range(full)),), (700,) * full)
    for stage in pipeline.stages[:-1]:  # the made-up losses, which stay, are as large as hidden states
        # The first rank of a stage sends at least as much as the others.
        walk = costs.walk(strategy, micro_batches_of(strategy, filled), stage.devices[0], messages=False)
        alone = walk.peak().total - walk.at_home.home
        ids = batch_bytes(700 * full, 700 * full) - batch_bytes(700 * count, 700 * count)
        assert {found[rank] for rank in stage.devices} == {alone - ids}


@settings(max_examples=max(12, settings.default.max_examples // 4))
@given(st.sampled_from(STRATEGIES), st.integers(1, 9))
def test_pipelines_end_as_their_costs_say(text: str, count: int) -> None:
    costs = priced.costs(6, priced.cluster(5, 1))
    strategy = Strategy.parse(text, 6)
    assignment = Assignment((tuple((i,) for i in range(count)),), (700,) * count)
    end = costs.pipelines_end(strategy, assignment)
    assert share_out(costs, strategy, [700] * count, 1)[1] == pytest.approx(end, rel=1e-12)


@settings(max_examples=max(8, settings.default.max_examples // 40))
@given(
    st.sampled_from(["4*<tp1,pp1>", "<tp1,pp4>r", "2*<tp1,pp2>", "<[0]x1,[1]x3> + <[2]x2,[3]x2>", "<[0,1]x3,[2]x1>"]),
    st.lists(st.integers(1, 12), min_size=4, max_size=4),
    st.sampled_from([200, 3000]),
    st.booleans(),
)
def test_memory_with_owners_by_block_is_that_of_the_whole_iteration(
    text: str, counts: list[int], tokens: int, uneven: bool
) -> None:
    cluster = priced.mixed() if uneven else priced.cluster(4)
    slower = {"fast": 1.0, "slow": 2.5}
    profiles = [priced.profile(4, name, slower[name], 500_000) for name in cluster.types]
    costs = Costs(Profile.merge([priced.that_saves(each) for each in profiles]), cluster)
    strategy = Strategy.parse(text, 4)
    assignment = Assignment.even(counts[: len(strategy.pipelines)], [tokens] * len(strategy.pipelines))
    found = owners_by_block(costs, strategy, assignment)
    assert found is not None
    home, memory = found
    walked = [each.total for each in costs.changed(home=home).memory(strategy, assignment)]
    # A run must be able to fill its pipelines.
    assert all(a >= b * (1 - ROUNDED) for a, b in zip(memory, walked, strict=True))
    if min(counts) > 8:
        assert memory == pytest.approx(walked, rel=10 * ROUNDED)


def test_pipelines_on_nodes_with_other_links_have_other_forms() -> None:
    fast = Node("fast", 2, priced.FAST, priced.SLOW)
    nodes = (fast, replace(fast, inner=Interconnect(1e9, 1e-6)), fast)
    costs = priced.costs(4, Cluster.of({"fast": DeviceType(1e15, 10**9, 1e12)}, nodes))
    strategy = Strategy.parse("<[0,1]x4> + <[2,3]x4> + <[4,5]x4>", 4)
    one, slow, same = (form_of(costs, pipeline) for pipeline in strategy.pipelines)
    assert one == same != slow

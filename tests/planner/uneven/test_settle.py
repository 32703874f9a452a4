import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.costs import micro_batches_of
from hydragraph.cost.memory import batch_bytes
from hydragraph.planner.uneven.settle import Ends, needs
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy
from tests.cost import priced

STRATEGIES = ("<[0]x6>", "<[0]x2,[1]x4>", "<[0]x1,[1]x2,[2]x3>", "<[0]x1,[1]x2,[2]x2,[3]x1>", "<[0,1]x3,[2]x3>")


@settings(max_examples=20)
@given(st.sampled_from(STRATEGIES), st.integers(1, 9), st.integers(0, 60))
def test_few_micro_batches_tell_what_a_stage_holds(text: str, count: int, less: int) -> None:
    costs = priced.costs(6, priced.cluster(4, 1))
    strategy = Strategy.parse(text, 6)
    (pipeline,) = strategy.pipelines
    lengths = tuple(700 - less * i for i in range(count))
    assignment = Assignment((tuple((i,) for i in range(count)),), lengths)
    found = needs(costs, strategy, assignment)
    # One micro-batch more than there are stages: a full pipeline, and then one that has all of its gradients.
    batches = micro_batches_of(strategy, assignment)[0][: len(pipeline.stages) + 1]
    more = sum(lengths[len(batches) :])
    for stage in pipeline.stages[:-1]:  # the made-up losses, which stay, are as large as hidden states
        for rank in stage.devices:
            walk = costs.walk(strategy, [batches], rank, messages=False)
            alone = walk.peak().total - walk.at_home.state - walk.at_home.shard
            assert found[rank] == alone + batch_bytes(more, more)


@given(st.sampled_from(STRATEGIES), st.integers(1, 9))
def test_pipelines_end_as_their_costs_say(text: str, count: int) -> None:
    costs = priced.costs(6, priced.cluster(4, 1))
    strategy = Strategy.parse(text, 6)
    assignment = Assignment((tuple((i,) for i in range(count)),), (700,) * count)
    end = costs.pipelines_end(strategy, assignment)
    assert Ends(costs, strategy, [700]).end(0, count) == pytest.approx(end, rel=1e-12)

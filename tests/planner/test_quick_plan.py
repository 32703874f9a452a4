"""The quick plan: every sequence once, no micro-batch too long, and the number of micro-batches that finishes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.quick_plan import (
    MICRO_BATCHES_PER_STAGE,
    OVERHEAD_TOKENS,
    USEFUL_TOKENS,
    assign,
    assign_pipelines,
)
from tests.thorough import thorough


def test_the_example_of_the_module() -> None:
    pipeline = PipelineCost(0.0, 1e-3, 0.0, 2, 10_000, 1, 2)
    plan = assign_pipelines([pipeline, pipeline], [5000, 4000, 3000, 3000, 3000])
    assert plan.micro_batches == (((0,), (3,)), ((1,), (2,), (4,)))


@given(
    text=st.sampled_from(["<tp1,pp1>", "<tp1,pp2>", "2*<tp1,pp3>", "<tp2,pp1> + <tp1,pp4>"]),
    lengths=st.lists(st.integers(0, 5000), max_size=60),
)
def test_every_sequence_with_tokens_is_assigned_once(text: str, lengths: list[int]) -> None:
    plan = assign(hg.Strategy.parse(text, layers=8), lengths)
    placed = [i for pipeline in plan.micro_batches for batch in pipeline for i in batch]
    assert sorted(placed) == [i for i, n in enumerate(lengths) if n]
    assert all(batch for pipeline in plan.micro_batches for batch in pipeline)


@thorough
@given(stages=st.integers(2, 6), tokens=st.integers(1, 400))
def test_micro_batches_are_as_many_as_finish_first(stages: int, tokens: int) -> None:
    lengths = [64] * (tokens * 8)
    total = sum(lengths)

    def seconds(count: int) -> float:
        return (count + stages - 1) * (total / count + OVERHEAD_TOKENS)

    least = min(MICRO_BATCHES_PER_STAGE * stages, len(lengths))
    most = max(least, total // USEFUL_TOKENS)
    plan = assign(hg.Strategy.parse(f"<tp1,pp{stages}>", layers=12), lengths)
    found = len(plan.micro_batches[0])
    assert least <= found <= most
    best = min(range(least, most + 1), key=seconds)
    assert seconds(found) <= 1.02 * seconds(best)


def test_a_single_stage_needs_one() -> None:
    plan = assign(hg.Strategy.parse("<tp1,pp1>", layers=2), [512] * 8)
    assert [len(pipeline) for pipeline in plan.micro_batches] == [1]

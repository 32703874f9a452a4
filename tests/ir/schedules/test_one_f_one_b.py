"""1F1B against the rule in its papers, for one pipeline and for pipelines that share stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.schedules.one_f_one_b import one_f_one_b
from hydragraph.ir.schedules.schedule import Shape
from tests.ir.schedules.examples import shapes


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_stage_runs_ahead_then_alternates_then_drains(stages: int, count: int) -> None:
    for stage, row in enumerate(one_f_one_b(Shape.alone(stages, count)).actions):
        warm = min(stages - 1 - stage, count)
        order = [f"F{m}" for m in range(warm)]
        for m in range(count - warm):
            order += [f"F{warm + m}", f"B{m}"]
        order += [f"B{m}" for m in range(count - warm, count)]
        assert [str(action) for action in row] == order


@given(shapes())
def test_no_more_micro_batches_of_a_pipeline_are_in_flight_than_stages_are_left(shape: Shape) -> None:
    schedule = one_f_one_b(shape)
    for stage in range(shape.size):
        left = [len(shape.stages[p]) - shape.stages[p].index(stage) for p in shape.pipelines[stage]]
        counts = [shape.counts[p] for p in shape.pipelines[stage]]
        assert schedule.in_flight(stage) <= sum(map(min, left, counts))
        if shape.is_last(stage):
            assert schedule.in_flight(stage) == 1

"""1F1B against the rule in its papers, for one pipeline and for pipelines that share stages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.schedule_replay import replayed
from hydragraph.ir.schedules.one_f_one_b import one_f_one_b
from hydragraph.ir.schedules.schedule import ScheduleShape
from tests.ir.schedules.examples import shapes


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_stage_runs_ahead_then_alternates_then_drains(stages: int, count: int) -> None:
    for stage, row in enumerate(one_f_one_b(ScheduleShape.alone(stages, count)).actions):
        warm = min(stages - 1 - stage, count)
        order = [f"F{m}" for m in range(warm)]
        for m in range(count - warm):
            order += [f"F{warm + m}", f"B{m}"]
        order += [f"B{m}" for m in range(count - warm, count)]
        assert [str(action) for action in row] == order


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_stages_fill_a_pipeline_in_a_fraction_of_the_time(devices: int, visits: int, sets: int) -> None:
    count = devices * sets
    rows = tuple(range(devices)) * visits
    forward, backward = 1.0, 2.0  # of a stage
    # All work of a device, and one stage of each other device before it.
    end = replayed(np.full((count, len(rows), 5), (0.0, forward, backward, 0.0, 0.0)), devices=rows).max()
    assert end == (visits * count + devices - 1) * (forward + backward)
    assert one_f_one_b(ScheduleShape((count,), (rows,))).in_flight(0) == min(
        visits * count, (visits - 1) * devices + 2 * (devices - 1) + 1
    )


@given(shapes())
def test_no_more_micro_batches_of_a_pipeline_are_in_flight_than_stages_are_left(shape: ScheduleShape) -> None:
    schedule = one_f_one_b(shape)
    if any(len(set(rows)) < len(rows) for rows in shape.stages):
        return  # interleaved stages hold more
    for stage in range(shape.size):
        pipelines = [(count, chain) for count, chain in zip(shape.counts, shape.stages, strict=True) if stage in chain]
        most = sum(min(count, len(chain) - chain.index(stage)) for count, chain in pipelines)
        assert schedule.in_flight(stage) <= most
        if shape.is_last(stage):
            assert schedule.in_flight(stage) == 1

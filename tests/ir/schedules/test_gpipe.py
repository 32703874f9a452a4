"""GPipe runs all forwards, then all backwards, each pipeline in ascending order."""

from __future__ import annotations

from hypothesis import given

from hydragraph.ir.schedules.gpipe import gpipe
from hydragraph.ir.schedules.schedule import ScheduleShape, Work
from tests.ir.schedules.examples import shapes


@given(shapes())
def test_all_forwards_then_all_backwards(shape: ScheduleShape) -> None:
    schedule = gpipe(shape)
    for stage, row in enumerate(schedule.actions):
        total = shape.totals[stage]
        assert [action.work for action in row] == [Work.FORWARD] * total + [Work.BACKWARD] * total
        for pipeline, chain in enumerate(shape.stages):
            for visit in range(chain.count(stage)):
                mine = [each.micro_batch for each in row if (each.pipeline, each.visit) == (pipeline, visit)]
                assert mine == [*shape.micro_batches[pipeline]] * 2
        assert schedule.in_flight(stage) == total

"""ZB-H1 against 1F1B: the same order and the same memory, with backwards in halves where a gradient is sent."""

from __future__ import annotations

from hypothesis import given

from hydragraph.ir.schedules.one_f_one_b import one_f_one_b
from hydragraph.ir.schedules.schedule import Action, Schedule, ScheduleShape, Work
from hydragraph.ir.schedules.zb_h1 import zb_h1
from tests.ir.schedules.examples import check, shapes

GRID = """schedule zb-h1
stage 0  F0 F1 .  B0 F2 .  B1 .  .  B2
stage 1  .  F0 I0 W0 F1 I1 W1 F2 I2 W2"""


def test_grid_of_two_stages() -> None:
    assert str(zb_h1(ScheduleShape.alone(2, 3))) == GRID
    assert Schedule.parse(GRID) == zb_h1(ScheduleShape.alone(2, 3))


@given(shapes())
def test_no_stage_holds_more_than_under_1f1b(shape: ScheduleShape) -> None:
    schedule = zb_h1(shape)
    check(schedule, shape)
    plain = one_f_one_b(shape)
    for stage in range(shape.size):
        assert schedule.in_flight(stage) == plain.in_flight(stage)


@given(shapes())
def test_it_is_1f1b_with_backwards_in_halves_behind_the_first_stage(shape: ScheduleShape) -> None:
    for stage, (row, plain) in enumerate(zip(zb_h1(shape).actions, one_f_one_b(shape).actions, strict=True)):
        whole: list[Action] = []
        for action in row:
            if action.work is Work.WEIGHT_GRADIENT:
                assert whole[-1] == action._replace(work=Work.INPUT_GRADIENT)
                whole[-1] = action._replace(work=Work.BACKWARD)
            else:
                assert action.work is not Work.BACKWARD or shape.stages[action.pipeline][0] == stage
                whole.append(action)
        assert tuple(whole) == plain

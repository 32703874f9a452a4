"""Promises of every kind of schedule, on which the cost of a pipeline relies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.schedules.schedule import ScheduleShape, Work
from hydragraph.ir.schedules.schedule_kinds import KINDS, in_flight, most_in_flight, schedule_of
from hydragraph.spec.schedule_names import SCHEDULES
from hydragraph.spec.strategy import Strategy
from tests.ir.schedules.examples import shapes


def test_a_strategy_may_name_every_kind() -> None:
    assert [Strategy.parse(f"<tp1,pp2> {name}", 2).schedule for name in SCHEDULES] == [*SCHEDULES]


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 6), st.integers(1, 12), st.data())
def test_fewer_micro_batches_run_in_the_order_of_more(kind: str, stages: int, count: int, data: st.DataObject) -> None:
    more = schedule_of(kind, ScheduleShape.alone(stages, count))
    fewer = data.draw(st.integers(1, count))
    for row, other in zip(schedule_of(kind, ScheduleShape.alone(stages, fewer)).actions, more.actions, strict=True):
        assert row == tuple(action for action in other if action.micro_batch < fewer)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 6), st.integers(1, 12))
def test_what_a_stage_holds_at_most(kind: str, stages: int, count: int) -> None:
    schedule = schedule_of(kind, ScheduleShape.alone(stages, count))
    for stage in range(stages):
        most = most_in_flight(kind, stages)[stage]
        assert schedule.in_flight(stage) == (count if most is None else min(most, count))
        assert schedule.in_flight(stage) == in_flight(kind, stages, count)[stage]


@pytest.mark.parametrize(("kind", "expected"), [("1f1b", (3, 2, 1)), ("gpipe", (None,) * 3), ("zb-h1", (3, 2, 1))])
def test_what_three_stages_hold(kind: str, expected: tuple[int | None, ...]) -> None:
    assert most_in_flight(kind, 3) == expected


@given(st.sampled_from(sorted(KINDS)), shapes())
def test_evaluation_runs_the_forwards_of_training(kind: str, shape: ScheduleShape) -> None:
    for row, other in zip(schedule_of(kind, shape, "evaluate").actions, schedule_of(kind, shape).actions, strict=True):
        assert row == tuple(action for action in other if action.work is Work.FORWARD)

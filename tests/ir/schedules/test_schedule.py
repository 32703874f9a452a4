"""A schedule prints as a grid, and parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.schedules import schedule as schedule_module
from hydragraph.ir.schedules.schedule import WORKS, Schedule, ScheduleShape, Work
from hydragraph.ir.schedules.schedule_kinds import KINDS, schedule_of
from tests.ir.schedules.examples import check, shapes

ONE = ScheduleShape.alone(2, 3)
GRID = """\
schedule 1f1b
stage 0  F0 F1 .  B0 F2 B1 .  B2
stage 1  .  F0 B0 F1 B1 F2 B2"""
# ZB-H1 in miniature: the halves of a backward run apart, and weight gradients fill what would be idle.
SHARED = [
    "stage 0  F0   .    .    B0",
    "stage 1  F1.1 F1.2 .    .    .    B1.1 .    B1.2",
    "stage 2  .    F0   B0   F1.1 B1.1 F1.2 B1.2",
]
SPLIT = """\
schedule split
stage 0  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
stage 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2"""


def test_the_grid_of_a_schedule() -> None:
    assert str(schedule_of("1f1b", ONE)) == GRID
    assert Schedule.parse(GRID) == schedule_of("1f1b", ONE)
    shared = schedule_of("1f1b", ScheduleShape((1, 2), ((0, 2), (1, 2))))
    assert str(shared).splitlines()[1:] == SHARED


def test_interleaved_stages_are_one_row() -> None:
    shape = ScheduleShape((2,), ((0, 1, 0, 1),))
    schedule = schedule_of("1f1b", shape)
    rows = [
        "stage 0  F0   F1   F0:1 F1:1 .    B0:1 .    B1:1 B0   B1",
        "stage 1  .    F0   F1   F0:1 B0:1 F1:1 B1:1 B0   B1",
    ]
    assert str(schedule).splitlines()[1:] == rows
    assert all(row in (schedule_module.__doc__ or "") for row in rows)


@given(st.sampled_from(sorted(KINDS)), shapes(), st.sampled_from(["train", "evaluate"]))
def test_every_schedule_passes_its_check_and_parses_back(kind: str, shape: ScheduleShape, mode: str) -> None:
    schedule = schedule_of(kind, shape, mode)
    check(schedule, shape, mode)  # pyrefly: ignore[bad-argument-type]
    assert Schedule.parse(str(schedule)) == schedule


def test_halves_of_backwards() -> None:
    split = Schedule.parse(SPLIT)
    check(split, ONE)
    assert str(split).splitlines()[1].split()[:4] == ["stage", "0", "F0", "F1"]
    assert Schedule.parse(str(split)) == split
    # A micro-batch is in flight until its weights' gradient is computed.
    assert [split.in_flight(s) for s in (0, 1)] == [3, 2]


@pytest.mark.parametrize(
    "rows",
    [
        ["F0 F1 B0 B1", "F0 B0"],
        ["F0 F1 B0 B1", "F0 F1 B0 B1 B1"],
        ["F1 F0 B0 B1", "F0 B0 F1 B1"],
        ["F0 F1 B0 B1", "F0 I0 F1 B1 W0"],
        ["F0 F1 B0 B1", "B0 F0 F1 B1"],
        ["F0 B0 F1 B1", "F0 F1 B0 B1"],  # each stage alone is in order; together they wait for each other
    ],
)
def test_the_check_of_schedules_finds_faults(rows: list[str]) -> None:
    text = "\n".join(["schedule mine", *(f"stage {s}  {row}" for s, row in enumerate(rows))])
    with pytest.raises(AssertionError):
        check(Schedule.parse(text), ScheduleShape.alone(2, 2))


def test_the_check_of_schedules_finds_messages_in_different_orders() -> None:
    text = "schedule mine\nstage 0  F0 F1.1 B0 B1.1\nstage 1  F1.1 F0 B0 B1.1"
    with pytest.raises(AssertionError):
        check(Schedule.parse(text), ScheduleShape((1, 1), ((0, 1), (0, 1))))


def test_a_deadlocked_grid_still_prints_all_its_cells() -> None:
    stuck = Schedule.parse("schedule mine\nstage 0  F0 B0\nstage 1  B0 F0")
    assert Schedule.parse(str(stuck)) == stuck


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage 0  F0", "line 1 is 'stage 0  F0'"),
        ("schedule a\nstage 1  F0", "line 2 is 'stage 1  F0': begin it with 'stage 0'"),
        ("schedule a\nstage 0  F0 X1", "stage 0, cell 1 is 'X1'"),
        ("schedule a\n\nstage 0  F0", "line 2 is ''"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 8), st.data())
def test_a_table_holds_the_actions_and_skips_to_smaller_micro_batches(
    kind: str, stages: int, count: int, data: st.DataObject
) -> None:
    schedule = schedule_of(kind, ScheduleShape.alone(stages, count))
    table = schedule.table(range(len(schedule.actions)))
    fewer = data.draw(st.integers(1, count))
    for s, row in enumerate(schedule.actions):
        mine = zip(table.work[s, : len(row)], table.micro_batch[s, : len(row)], strict=True)
        assert [(WORKS[w], m) for w, m in mine] == [(action.work, action.micro_batch) for action in row]
        assert (table.work[s, len(row) :] == -1).all()
        # Skipping the micro-batches that do not exist visits every other action, in order.
        visited = []
        at = 0
        while at < len(row):
            if table.micro_batch[s, at] < fewer:
                visited.append(row[at])
                at += 1
            else:
                at = int(table.skip[s, at])
        assert visited == [action for action in row if action.micro_batch < fewer]


def test_a_table_pads_shorter_rows() -> None:
    table = Schedule.parse("schedule a\nstage 0  F0 B0\nstage 1  F0").table(range(2))
    assert table.work.tolist() == [[WORKS.index(Work.FORWARD), WORKS.index(Work.BACKWARD)], [0, -1]]

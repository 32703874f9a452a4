"""The compiled replay of a table against relaxation over every dependency, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.compiled_replay import BACKWARD, FORWARD, PARTS, replay, scratch_of
from hydragraph.ir.schedules.schedule import Schedule, ScheduleShape
from hydragraph.ir.schedules.schedule_kinds import schedule_of, table_of
from tests.cost.test_schedule_replay import Rows, pipelines, relaxed


@given(pipelines(), st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(0, 40), st.data())
def test_a_table_for_more_micro_batches_serves_fewer_in_any_order(
    rows: tuple[Rows, Rows, Rows, Rows, Rows], schedule: str, more: int, data: st.DataObject
) -> None:
    stages, count = len(rows[1]), len(rows[1][0])
    order = data.draw(st.permutations(range(count)))
    seconds = np.zeros((count, stages, PARTS))
    for part, of_part in enumerate(rows):
        for s, row in enumerate(of_part):
            seconds[order, s, part] = row
    table = schedule_of(schedule, ScheduleShape.alone(stages, count + more)).table(range(stages))
    end = replay(table, stages, seconds, np.array(order), count, scratch_of(stages, count))
    assert end == relaxed(*rows, schedule)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["F0 F1 B0 B1", "F0 F1 B0 B1"], 9.0),  # stage 1 ends its backwards at 5 and 7
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], math.inf),  # it deadlocks
    ],
)
def test_any_schedule_can_be_replayed(rows: list[str], expected: float) -> None:
    text = "\n".join(["schedule mine", *(f"stage {s}  {row}" for s, row in enumerate(rows))])
    seconds = np.zeros((2, 2, PARTS))
    seconds[:, :, FORWARD] = 1.0
    seconds[:, :, BACKWARD] = 2.0
    table = Schedule.parse(text).table(range(2))
    assert replay(table, 2, seconds, np.arange(2), 2, scratch_of(2, 2)) == expected


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_table_that_is_too_short_is_refused(schedule: str) -> None:
    table = table_of(schedule, 2, 8)
    with pytest.raises(ValueError, match="fewer micro-batches"):
        replay(table, 2, np.zeros((9, 2, PARTS)), np.arange(9), 9, scratch_of(2, 9))


def test_a_table_of_more_stages_is_refused() -> None:
    """Without the check, compiled code would write beyond its buffers."""
    table = table_of("1f1b", (0, 1, 0, 1), 4)
    with pytest.raises(ValueError, match="more stages"):
        replay(table, 2, np.zeros((4, 2, PARTS)), np.arange(4), 4, scratch_of(2, 4))


def test_a_weight_gradient_may_wait() -> None:
    """Stage 1 returns both gradients before it makes those of its weights: 0-1 F, 1-2 F, then I 2-3, F 3-4, I 4-5."""
    later = Schedule.parse("schedule mine\nstage 0  F0 F1 B0 B1\nstage 1  F0 I0 F1 I1 W0 W1")
    rows = np.zeros((2, 2, PARTS))
    rows[..., FORWARD] = 1.0
    rows[..., BACKWARD] = 2.0
    scratch = scratch_of(2, 2)
    assert replay(later.table(range(2)), 2, rows, np.arange(2), 2, scratch) == 7.0
    assert scratch.clock.tolist() == [7.0, 7.0]

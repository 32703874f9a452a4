"""Kinds of schedules, by name.

Every kind runs a pipeline's micro-batches in ascending order, which fixes the order of gradient sums. If no stage is
shared, removing a schedule's last micro-batches yields the schedule for fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from hydragraph.ir.program_outline import Mode
from hydragraph.ir.schedules import gpipe, one_f_one_b, zb_h1
from hydragraph.ir.schedules.clock import forwards_of
from hydragraph.ir.schedules.schedule import Schedule, ScheduleShape, ScheduleTable, Work
from hydragraph.spec.schedule_names import SCHEDULES

KINDS: Mapping[str, Callable[[ScheduleShape], Schedule]] = {
    one_f_one_b.NAME: one_f_one_b.one_f_one_b,
    gpipe.NAME: gpipe.gpipe,
    zb_h1.NAME: zb_h1.zb_h1,
}
assert tuple(KINDS) == SCHEDULES

WHOLE_BACKWARD = frozenset(
    name
    for name, build in KINDS.items()
    if all(
        action.work in (Work.FORWARD, Work.BACKWARD)
        for row in build(ScheduleShape.alone(2, 1)).actions
        for action in row
    )
)
ALL_IN_FLIGHT = gpipe.NAME


@lru_cache(maxsize=64)
def schedule_of(kind: str, shape: ScheduleShape, mode: Mode = "train") -> Schedule:
    """Return the schedule of a kind, with only forwards in mode "evaluate"."""
    if mode == "evaluate":
        stages = range(shape.size)
        return Schedule(kind, tuple(tuple(action for _, action in forwards_of(shape, stage)) for stage in stages))
    return KINDS[kind](shape)


@lru_cache(maxsize=256)
def most_in_flight(kind: str, stages: int) -> tuple[int | None, ...]:
    """Return the largest number of micro-batches in flight on each stage, or None without a limit."""
    # Limited schedules hold at most `stages` micro-batches. One that holds stages + 1 at once is
    # unlimited.
    count = stages + 1
    schedule = KINDS[kind](ScheduleShape.alone(stages, count))
    return tuple(most if most < count else None for most in map(schedule.in_flight, range(stages)))


def in_flight(kind: str, stages: int, count: int) -> tuple[int, ...]:
    """Return the largest number of micro-batches in flight on each stage, for `count` micro-batches."""
    return tuple(count if most is None else min(most, count) for most in most_in_flight(kind, stages))


def table_of(kind: str, rows: int | tuple[int, ...], count: int) -> ScheduleTable:
    """Return a table for at least `count` micro-batches.

    Args:
        rows: row of each stage, or the number of stages.
    """
    # A table also serves smaller counts, so powers of two need few tables.
    return _table(kind, tuple(range(rows)) if isinstance(rows, int) else rows, 1 << max(3, (count - 1).bit_length()))


@lru_cache(maxsize=64)
def _table(kind: str, rows: tuple[int, ...], count: int) -> ScheduleTable:
    return KINDS[kind](ScheduleShape((count,), (rows,))).table(rows)

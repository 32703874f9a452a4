"""Kinds of schedules by name: the only place that maps a strategy's `schedule` to the order of its work.

Every kind runs a pipeline's micro-batches in ascending order, so that gradients are summed in the same order. In a
pipeline that shares no stage, the order for fewer micro-batches is the order for more without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from hydragraph.ir.program_outline import Mode
from hydragraph.ir.schedules import gpipe, one_f_one_b, zb_h1
from hydragraph.ir.schedules.clock import forwards_of
from hydragraph.ir.schedules.schedule import Schedule, ScheduleTable, Shape, Work

KINDS: Mapping[str, Callable[[Shape], Schedule]] = {
    one_f_one_b.NAME: one_f_one_b.one_f_one_b,
    gpipe.NAME: gpipe.gpipe,
    zb_h1.NAME: zb_h1.zb_h1,
}

# Kinds whose backwards all are one action, not two halves.
WHOLE_BACKWARD = frozenset(
    name
    for name, build in KINDS.items()
    if all(action.work in (Work.FORWARD, Work.BACKWARD) for row in build(Shape.alone(2, 1)).actions for action in row)
)
# Schedule kind that keeps all micro-batches of a stage in flight.
ALL_IN_FLIGHT = gpipe.NAME


@lru_cache(maxsize=64)
def schedule_of(kind: str, shape: Shape, mode: Mode = "train") -> Schedule:
    """Return the schedule of a kind for pipelines of a shape; to evaluate, the forwards in clock order."""
    if mode == "evaluate":
        stages = range(shape.size)
        return Schedule(kind, tuple(tuple(action for _, action in forwards_of(shape, stage)) for stage in stages))
    return KINDS[kind](shape)


@lru_cache(maxsize=256)
def most_in_flight(kind: str, stages: int) -> tuple[int | None, ...]:
    """Return how many micro-batches each stage of a pipeline holds at most, however many there are; None: all of them.

    A kind that bounds them at all holds no more than there are stages.
    """
    count = stages + 1
    schedule = KINDS[kind](Shape.alone(stages, count))
    return tuple(most if most < count else None for most in map(schedule.in_flight, range(stages)))


def in_flight(kind: str, stages: int, count: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage of a pipeline holds at most, of `count` ones."""
    return tuple(count if most is None else min(most, count) for most in most_in_flight(kind, stages))


def table_of(kind: str, rows: int | tuple[int, ...], count: int) -> ScheduleTable:
    """Return the table of a kind for a pipeline that shares no stage, of at least `count` micro-batches.

    Args:
        rows: the row of each of its stages (`Shape`), or their number if each has its own.
    """
    # One table serves all smaller counts, so a few sizes suffice.
    return _table(kind, tuple(range(rows)) if isinstance(rows, int) else rows, 1 << max(3, (count - 1).bit_length()))


@lru_cache(maxsize=64)
def _table(kind: str, rows: tuple[int, ...], count: int) -> ScheduleTable:
    return KINDS[kind](Shape((count,), (rows,))).table(rows)

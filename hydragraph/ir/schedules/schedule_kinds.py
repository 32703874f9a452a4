"""Kinds of schedules, by the name in a strategy.

Every kind runs a pipeline's micro-batches in ascending order, which fixes the order of gradient sums. If no stage is
shared, the order for fewer micro-batches is a subsequence of the order for more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from hydragraph.ir.program_outline import Mode
from hydragraph.ir.schedules import gpipe, one_f_one_b, zb_h1
from hydragraph.ir.schedules.clock import forwards_of
from hydragraph.ir.schedules.schedule import Schedule, ScheduleTable, Shape, Work
from hydragraph.spec.strategy_text import SCHEDULES

KINDS: Mapping[str, Callable[[Shape], Schedule]] = {
    one_f_one_b.NAME: one_f_one_b.one_f_one_b,
    gpipe.NAME: gpipe.gpipe,
    zb_h1.NAME: zb_h1.zb_h1,
}
assert tuple(KINDS) == SCHEDULES

WHOLE_BACKWARD = frozenset(
    name
    for name, build in KINDS.items()
    if all(action.work in (Work.FORWARD, Work.BACKWARD) for row in build(Shape.alone(2, 1)).actions for action in row)
)
ALL_IN_FLIGHT = gpipe.NAME


@lru_cache(maxsize=64)
def schedule_of(kind: str, shape: Shape, mode: Mode = "train") -> Schedule:
    """Return a kind's schedule; in mode "evaluate", forwards only."""
    if mode == "evaluate":
        stages = range(shape.size)
        return Schedule(kind, tuple(tuple(action for _, action in forwards_of(shape, stage)) for stage in stages))
    return KINDS[kind](shape)


@lru_cache(maxsize=256)
def most_in_flight(kind: str, stages: int) -> tuple[int | None, ...]:
    """Return the most micro-batches on each stage, at most the number of stages; None: all."""
    count = stages + 1
    schedule = KINDS[kind](Shape.alone(stages, count))
    return tuple(most if most < count else None for most in map(schedule.in_flight, range(stages)))


def in_flight(kind: str, stages: int, count: int) -> tuple[int, ...]:
    """Return the most of `count` micro-batches on each stage."""
    return tuple(count if most is None else min(most, count) for most in most_in_flight(kind, stages))


def table_of(kind: str, rows: int | tuple[int, ...], count: int) -> ScheduleTable:
    """Return a kind's table of at least `count` micro-batches, given stages' rows or their number."""
    return _table(kind, tuple(range(rows)) if isinstance(rows, int) else rows, 1 << max(3, (count - 1).bit_length()))


@lru_cache(maxsize=64)
def _table(kind: str, rows: tuple[int, ...], count: int) -> ScheduleTable:
    return KINDS[kind](Shape((count,), (rows,))).table(rows)

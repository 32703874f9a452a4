"""GPipe: a stage runs all forwards, then all backwards."""

from __future__ import annotations

from hydragraph.ir.schedules.clock import backwards_of, forwards_of
from hydragraph.ir.schedules.schedule import Schedule, ScheduleShape

NAME = "gpipe"


def gpipe(shape: ScheduleShape) -> Schedule:
    return Schedule(
        NAME,
        tuple(
            tuple(action for _, action in (*forwards_of(shape, stage), *backwards_of(shape, stage)))
            for stage in range(shape.size)
        ),
    )

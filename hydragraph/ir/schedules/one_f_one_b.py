"""1F1B: a stage runs some forwards, then alternates one backward and one forward, then runs the last backwards.

Stage s (from 0) of S holds activations of at most S - s micro-batches.
"""

from __future__ import annotations

from operator import itemgetter

from hydragraph.ir.schedules.clock import backwards_of, forwards_of
from hydragraph.ir.schedules.schedule import Action, Schedule, ScheduleShape, Work

NAME = "1f1b"


def one_f_one_b(shape: ScheduleShape) -> Schedule:
    return Schedule(NAME, tuple(_row(shape, stage) for stage in range(shape.size)))


def _row(shape: ScheduleShape, stage: int) -> tuple[Action, ...]:
    forwards = forwards_of(shape, stage)
    if shape.is_last(stage):
        # On the last stage, a backward waits only for its forward.
        return tuple(action for _, one in forwards for action in (one, one._replace(work=Work.BACKWARD)))
    # At equal times, backwards precede forwards, to free memory.
    return tuple(action for _, action in sorted([*backwards_of(shape, stage), *forwards], key=itemgetter(0)))

"""1F1B: a stage runs a few forwards ahead, then a backward and a forward in turn, then the remaining backwards.

Stage s of S runs min(M, S - 1 - s) of M forwards ahead, so at most S - s micro-batches of a pipeline are in flight.
"""

from __future__ import annotations

from operator import itemgetter

from hydragraph.ir.schedules.clock import backwards_of, forwards_of
from hydragraph.ir.schedules.schedule import Action, Schedule, Shape, Work

NAME = "1f1b"


def one_f_one_b(shape: Shape) -> Schedule:
    """Return a shape's 1F1B schedule."""
    return Schedule(NAME, tuple(_row(shape, stage) for stage in range(shape.size)))


def _row(shape: Shape, stage: int) -> tuple[Action, ...]:
    forwards = forwards_of(shape, stage)
    if shape.is_last(stage):
        # A backward only waits for its own forward there.
        return tuple(action for _, one in forwards for action in (one, one._replace(work=Work.BACKWARD)))
    # The sort is stable: at equal times a backward comes before a forward, to free memory.
    return tuple(action for _, action in sorted([*backwards_of(shape, stage), *forwards], key=itemgetter(0)))

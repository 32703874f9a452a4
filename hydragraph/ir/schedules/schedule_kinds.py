"""Kinds of schedules by name: the only place that maps a strategy's `schedule` to the order of its work.

Every kind runs a pipeline's micro-batches in ascending order, so that gradients are summed in the same order under all
kinds. In a pipeline that shares no stage, the order for fewer micro-batches is the order for more without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from hydragraph.ir.program_outline import Mode
from hydragraph.ir.schedules import gpipe, one_f_one_b
from hydragraph.ir.schedules.clock import forwards_of
from hydragraph.ir.schedules.schedule import Schedule, Shape

KINDS: Mapping[str, Callable[[Shape], Schedule]] = {
    one_f_one_b.NAME: one_f_one_b.one_f_one_b,
    gpipe.NAME: gpipe.gpipe,
}


@lru_cache(maxsize=64)
def schedule_of(kind: str, shape: Shape, mode: Mode = "train") -> Schedule:
    """Return the schedule of a kind for pipelines of a shape; to evaluate, the forwards in clock order."""
    if mode == "evaluate":
        stages = range(shape.size)
        return Schedule(kind, tuple(tuple(action for _, action in forwards_of(shape, stage)) for stage in stages))
    return KINDS[kind](shape)


@lru_cache(maxsize=1024)
def most_in_flight(kind: str, stages: int, stage: int) -> int | None:
    """Return how many micro-batches a stage of a pipeline holds at most, however many there are; None: all of them.

    A kind that bounds them at all holds no more than there are stages.
    """
    count = stages + 1
    most = schedule_of(kind, Shape.alone(stages, count)).in_flight(stage)
    return most if most < count else None

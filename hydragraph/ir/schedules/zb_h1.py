"""ZB-H1: 1F1B in which a stage sends the gradient of its input before it computes the gradients of its weights.

    stage 0  F0 F1 .  .  B0 F2 .  B1 .  .  B2
    stage 1  .  F0 I0 W0 F1 I1 W1 F2 I2 W2

The first stage does not split its backwards, and every stage holds as many micro-batches as under 1F1B. If each of S
stages takes f for a forward, and i and w for the halves of a backward, a pipeline idles for (S - 1) (f + i), and under
1F1B for (S - 1) (f + i + w). The ZB-H1 of Qi et al. (Zero Bubble Pipeline Parallelism, 2023) idles less, but every
stage holds as many micro-batches as the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from hydragraph.ir.schedules.one_f_one_b import one_f_one_b
from hydragraph.ir.schedules.schedule import Action, Schedule, ScheduleShape, Work

NAME = "zb-h1"


def zb_h1(shape: ScheduleShape) -> Schedule:
    rows = enumerate(one_f_one_b(shape).actions)
    return Schedule(NAME, tuple(tuple(half for action in row for half in _halves(shape, s, action)) for s, row in rows))


def _halves(shape: ScheduleShape, stage: int, action: Action) -> Iterator[Action]:
    if action.work is Work.BACKWARD and shape.places[action.pipeline][0] != (stage, action.visit):
        yield action._replace(work=Work.INPUT_GRADIENT)
        yield action._replace(work=Work.WEIGHT_GRADIENT)
    else:
        yield action

"""Exact duration of a pipeline with unequal stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.ir.schedules.schedule_kinds import table_of
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE

Rows = Sequence[Sequence[float]]  # [stages, micro-batches]


def stage_ends(
    early: Rows,
    forward: Rows,
    backward: Rows,
    ahead: Rows,
    back: Rows,
    schedule: str = DEFAULT_SCHEDULE,
    devices: tuple[int, ...] = (),
) -> list[float]:
    """Return the end of the last action on each stage's devices; see `compiled_replay`.

    Args:
        early, forward, backward: seconds of each micro-batch on each stage.
        ahead: seconds to send each hidden state from each stage to the next; the last stage's are ignored.
        back: seconds to send each hidden state's gradient back.
        devices: each stage's group of devices (`Pipeline.rows`); empty: each stage has its own.
    """
    from hydragraph.cost.compiled_replay import PARTS, replay, scratch_of

    stages = len(forward)
    count = len(forward[0]) if forward else 0
    if not count:
        return [0.0] * stages
    rows = np.zeros((count, stages, PARTS))
    for part, seconds in enumerate((early, forward, backward, ahead, back)):
        for s, row in enumerate(seconds):
            rows[:, s, part] = row
    scratch = scratch_of(stages, count)
    replay(table_of(schedule, devices or stages, count), stages, rows, np.arange(count), count, scratch)
    return [float(scratch.clock[row]) for row in devices or range(stages)]

"""The exact end of a pipeline with unequal stages and messages that take time.

`stage_ends` is for messages that travel during computation (`compiled_replay`), `exchanged_end` for blocking ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.ir.schedules.schedule_kinds import table_of
from hydragraph.spec.strategy_text import DEFAULT_SCHEDULE

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
    """Return when the last backward on each stage's devices ends; see `compiled_replay`.

    Args:
        early, forward, backward: seconds of each micro-batch on each stage, in the order in which they run [S][V].
        ahead: seconds of a hidden state from each stage to the next [S - 1][V], or one more row, which is not used.
        back: seconds of its gradient, from stage s + 1 to s, like `ahead`.
        schedule: its kind.
        devices: number of each stage's group of devices (`Pipeline.rows`); empty: each has its own.
    """
    # numba is imported on the first call: most commands price nothing.
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


def exchanged_end(
    forward: Rows, backward: Rows, ahead: Rows, back: Rows, buffered: Sequence[Sequence[tuple[bool, bool]]]
) -> float:
    """Return when the last backward ends of a pipeline whose neighbours exchange between computations.

    Stage s of S computes the forward of micro-batch m in slot 2 m + s, and its backward in slot 2 m + 2 S - 1 - s, so
    the neighbour of a stage in a forward is in a backward. Before its forward, stage s + 1 sends the last gradient
    back, then receives the next hidden state (DeepSpeed, TrainSchedule). Both ends are occupied from a message's begin
    to its end, except that the sender of a buffered message continues immediately.

    Example, S = 2, V = 1, forward 1, backward 2, messages 3: 1 + 3 + (1 + 2) + 3 + 2 = 12.

    Args:
        forward, backward: seconds of each micro-batch on each stage, in the order in which they run [S][V].
        ahead: seconds of a hidden state from each stage to the next [S - 1][V].
        back: seconds of its gradient, from stage s + 1 to s [S - 1][V].
        buffered: whether hidden state and gradient are buffered [S - 1][V].
    """
    stages = len(forward)
    count = len(forward[0]) if forward else 0
    clock = [0.0] * stages

    def give(sender: int, receiver: int, seconds: float, on: bool) -> None:
        end = max(clock[sender], clock[receiver]) + seconds
        clock[receiver] = end
        if not on:
            clock[sender] = end

    for slot in range(2 * (count + stages - 1)):
        for s in range(stages - 1):
            came, odd = divmod(slot - s - 1, 2)
            if odd:
                continue
            gone = (slot + s + 1) // 2 - stages
            if 0 <= gone < count:
                give(s + 1, s, back[s][gone], buffered[s][gone][1])
            if 0 <= came < count:
                give(s, s + 1, ahead[s][came], buffered[s][came][0])
        for s in range(stages):
            m, odd = divmod(slot - s, 2)
            if not odd and 0 <= m < count:
                clock[s] += forward[s][m]
            m, odd = divmod(slot + s + 1, 2)
            if not odd and 0 <= m - stages < count:
                clock[s] += backward[s][m - stages]
    return max(clock, default=0.0)

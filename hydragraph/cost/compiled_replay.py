"""Exact duration of a pipeline with unequal stages and micro-batches, from a schedule's table (`ir.schedules`).

    S, V            numbers of the pipeline's stages and micro-batches
    M               number of micro-batches in `rows`, at least V
    rows[m, s]      [M, S, 5]  seconds of micro-batch m on stage s, by part:
                    EARLY      work that can begin before the forward's message arrives
                    FORWARD, BACKWARD
                    AHEAD      sending the hidden state to stage s + 1
                    BACK       sending the gradient from stage s + 1 to s
    F(s, x)         end of the x-th micro-batch's forward on stage s; m = order[x]
    B(s, x)         end of the x-th micro-batch's backward on stage s
    P               end of the row's previous action

Each row of the table runs the stages of one group of devices, one action at a time:

    F(s, x) = max(P + EARLY, F(s - 1, x) + AHEAD of stage s - 1) + FORWARD
    B(s, x) = max(P, B(s + 1, x) + BACK of stage s) + BACKWARD

The input gradient of a split backward follows the formula of B with a share of BACKWARD; the weight gradient waits for
no message.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from hydragraph.cost.instruction_work import SHARES
from hydragraph.ir.layout import Floats, Ints
from hydragraph.ir.schedules.schedule import WORKS, ScheduleTable, Work
from hydragraph.kernels.numba_compiler import compiled

EARLY = 0
FORWARD = 1
BACKWARD = 2
AHEAD = 3
BACK = 4
PARTS = 5

_RUN_FORWARD = WORKS.index(Work.FORWARD)
_RUN_BACKWARD = WORKS.index(Work.BACKWARD)
_RUN_INPUT_GRADIENT = WORKS.index(Work.INPUT_GRADIENT)
_INPUT_SHARE = SHARES[Work.INPUT_GRADIENT]
_WEIGHT_SHARE = SHARES[Work.WEIGHT_GRADIENT]


class ReplayBuffers(NamedTuple):
    """Buffers of `replay`: F and B [S, V], and the end of each row's last action [S]."""

    ends_f: Floats
    ends_b: Floats
    clock: Floats
    done_f: Ints
    done_b: Ints
    at: Ints


@partial(compiled, quick=True, shared=True)
def scratch_of(stages: int, count: int) -> ReplayBuffers:
    return ReplayBuffers(
        np.empty((stages, count)),
        np.empty((stages, count)),
        np.empty(stages),
        np.empty(stages, np.int64),
        np.empty(stages, np.int64),
        np.empty(stages, np.int64),
    )


@partial(compiled, quick=True, shared=True)
def replay(table: ScheduleTable, stages: int, rows: Floats, order: Ints, count: int, scratch: ReplayBuffers) -> float:
    """Return the end of a pipeline's last action, or infinity if the schedule deadlocks.

    `table` and `scratch` must be for at least `count` micro-batches.
    """
    work, micro_batch, skip, stage = table
    actions = work.shape[1]
    ends_f, ends_b, clock, done_f, done_b, at = scratch
    for s in range(stages):
        clock[s] = 0.0
        done_f[s] = 0
        done_b[s] = 0
        at[s] = 0
    # Visit rows in ascending order, which suits forwards, then descending, which suits backwards.
    down = True
    waiting = True
    while waiting:
        waiting = False
        advanced = False
        for turn in range(stages):
            row = turn if down else stages - 1 - turn
            now = clock[row]
            a = at[row]
            while a < actions:
                x = micro_batch[row, a]
                # The table may have more micro-batches than this pipeline; `skip` leads to the next
                # existing action.
                if x >= count:
                    a = skip[row, a]
                    continue
                if x < 0:
                    break
                m = order[x]
                s = stage[row, a]
                if s >= stages:
                    raise ValueError("the table has more stages than the pipeline")
                if work[row, a] == _RUN_FORWARD:
                    # The message is not sent yet: try again after the other rows.
                    if s and done_f[s - 1] <= x:
                        waiting = True
                        break
                    # EARLY work overlaps with the transfer, so it precedes the wait.
                    now += rows[m, s, EARLY]
                    if s:
                        now = max(now, ends_f[s - 1, x] + rows[m, s - 1, AHEAD])
                    now += rows[m, s, FORWARD]
                    ends_f[s, x] = now
                    done_f[s] = x + 1
                elif work[row, a] == _RUN_BACKWARD or work[row, a] == _RUN_INPUT_GRADIENT:
                    if s < stages - 1:
                        if done_b[s + 1] <= x:
                            waiting = True
                            break
                        now = max(now, ends_b[s + 1, x] + rows[m, s, BACK])
                    now += rows[m, s, BACKWARD] * (1.0 if work[row, a] == _RUN_BACKWARD else _INPUT_SHARE)
                    ends_b[s, x] = now
                    done_b[s] = x + 1
                else:
                    now += rows[m, s, BACKWARD] * _WEIGHT_SHARE
                a += 1
                advanced = True
            clock[row] = now
            at[row] = a
        # No row can advance: the schedule deadlocks.
        if waiting and not advanced:
            return np.inf
        down = not down
    last = 0.0
    for s in range(stages):
        if done_f[s] < count:
            raise ValueError("the table has fewer micro-batches than the pipeline")
        last = max(last, clock[s])
    return last

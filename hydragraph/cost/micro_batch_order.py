"""Search for the order of micro-batches that ends earliest on equal stages.

Equations of Hydraulis -> functions:

    Appendix D.1, approximate seconds of a pipeline     `published_seconds`
    the end of the schedule (ours)                      `pipeline_seconds`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost import compiled_replay
from hydragraph.cost.compiled_replay import PARTS, Scratch, replay, scratch_of
from hydragraph.cost.schedule_replay import replayed
from hydragraph.ir.schedules.schedule import ScheduleTable
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORWARD = 1 / 3
_FORWARD = compiled_replay.FORWARD
_BACKWARD = compiled_replay.BACKWARD


@compiled
def equal_stages(costs: Floats, stages: int) -> Floats:
    """Return the `rows` of `replay` for equal stages [V, S, 5]."""
    rows = np.zeros((len(costs), stages, PARTS))
    for j in range(len(costs)):
        for s in range(stages):
            rows[j, s, _FORWARD] = FORWARD * costs[j]
            rows[j, s, _BACKWARD] = (1.0 - FORWARD) * costs[j]
    return rows


@compiled
def longest_to_shortest(costs: Floats) -> Ints:
    count = len(costs)
    descending = np.empty(count, np.int64)
    for j in range(count):
        # Insertion sort is stable and compiles fast.
        at = j
        while at and costs[descending[at - 1]] < costs[j]:
            descending[at] = descending[at - 1]
            at -= 1
        descending[at] = j
    return descending


@compiled
def starting_order(descending: Ints, shape: int) -> Ints:
    """Return one of four orders: descending, ascending, largest in the middle, largest at both ends."""
    count = len(descending)
    if shape == 0:
        return descending.copy()
    trial = np.empty(count, np.int64)
    low = 0
    high = count - 1
    for i in range(count):
        if shape < 3:
            source = descending[count - 1 - i]
        else:
            source = descending[i]
        if i % 2 and shape > 1:
            trial[high] = source
            high -= 1
        else:
            trial[low] = source
            low += 1
    return trial


@compiled
def climbed(rows: Floats, order: Ints, end: float, table: ScheduleTable, rounds: int, scratch: Scratch) -> float:
    """Improve an order in place by at most `rounds` rounds of swaps; return its end."""
    count, stages = rows.shape[:2]
    for _ in range(rounds):
        improved = False
        for i in range(count - 1):
            for j in range(i + 1, count):
                order[i], order[j] = order[j], order[i]
                swapped = replay(table, stages, rows, order, count, scratch)
                if swapped < end * (1 - 1e-12):
                    end = swapped
                    improved = True
                else:
                    order[i], order[j] = order[j], order[i]
        if not improved:
            break
    return end


@compiled
def best_order(costs: Floats, stages: int, table: ScheduleTable, climb: int) -> tuple[float, Ints]:
    """Return the earliest end found, and the order.

    Args:
        costs: each micro-batch's seconds on one stage [V].
        climb: maximum rounds of swaps for each starting order.
    """
    count = len(costs)
    rows = equal_stages(costs, stages)
    scratch = scratch_of(stages, count)
    best_order = np.arange(count)
    best = replay(table, stages, rows, best_order, count, scratch)
    if stages == 1 or count < 2:
        return best, best_order
    descending = longest_to_shortest(costs)
    best = climbed(rows, best_order, best, table, climb, scratch)
    for shape in range(4):
        trial = starting_order(descending, shape)
        end = climbed(rows, trial, replay(table, stages, rows, trial, count, scratch), table, climb, scratch)
        if end < best:
            best = end
            best_order = trial
    return best, best_order


def published_seconds(costs: Sequence[float], stages: int) -> float:
    return sum(costs) + (stages - 1) * max(costs) if costs else 0.0


def pipeline_seconds(costs: Sequence[float], stages: int, schedule: str = DEFAULT_SCHEDULE) -> float:
    """Return the seconds until micro-batches in this order end on equal stages; `costs` as in `best_order`."""
    if not costs:
        return 0.0
    return float(replayed(equal_stages(np.asarray(costs, dtype=np.float64), stages), schedule).max())

"""When a pipeline finishes under 1F1B with unequal micro-batches, exactly; and the order in which it finishes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.planner.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORWARD = 1 / 3  # of a micro-batch's time on a stage; backward does twice the work


@compiled
def one_f_one_b(seconds: Floats, order: Ints, forward: float) -> float:
    """Return when the last backward of the first stage ends.

    A stage s of S runs min(S - 1 - s, V) forwards, then a forward and a backward in turn, then what backwards remain;
    a forward waits for its own on the stage before, a backward for its own on the stage after.

    Args:
        seconds: forward and backward of each micro-batch on each stage [S, V].
        order: in which the micro-batches run, on all stages.
        forward: the forward's part of them.
    """
    stages, count = seconds.shape
    ends_f, ends_b = np.full((stages, count), -1.0), np.full((stages, count), -1.0)
    clock = np.zeros(stages)
    done_f, done_b = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    left = 2 * stages * count
    while left:
        for s in range(stages):
            while done_b[s] < count:
                ahead = min(stages - s, count)
                if done_f[s] < count and done_f[s] - done_b[s] < ahead:
                    m = order[done_f[s]]
                    ready = ends_f[s - 1, m] if s else 0.0
                    if ready < 0.0:
                        break
                    clock[s] = max(clock[s], ready) + forward * seconds[s, m]
                    ends_f[s, m] = clock[s]
                    done_f[s] += 1
                else:
                    m = order[done_b[s]]
                    ready = ends_b[s + 1, m] if s < stages - 1 else ends_f[s, m]
                    if ready < 0.0:
                        break
                    clock[s] = max(clock[s], ready) + (1.0 - forward) * seconds[s, m]
                    ends_b[s, m] = clock[s]
                    done_b[s] += 1
                left -= 1
    return clock.max()


@compiled
def equal_stages(costs: Floats, stages: int) -> Floats:
    """Return [S, V] of stages that take the same time."""
    result = np.empty((stages, len(costs)))
    for s in range(stages):
        for j in range(len(costs)):
            result[s, j] = costs[j]
    return result


@compiled
def longest_to_shortest(seconds: Floats) -> Ints:
    """Return the micro-batches by their seconds on all stages, descending."""
    stages, count = seconds.shape
    descending, totals = np.arange(count), np.zeros(count)
    for j in range(count):
        for s in range(stages):
            totals[j] += seconds[s, j]
        at = j  # insertion sort
        while at and totals[descending[at - 1]] < totals[j]:
            descending[at] = descending[at - 1]
            at -= 1
        descending[at] = j
    return descending


@compiled
def starting_order(descending: Ints, shape: int) -> Ints:
    """Return one of four orders: descending, ascending, the largest in the middle, the largest at both ends."""
    count = len(descending)
    if shape == 0:
        return descending.copy()
    trial = np.empty(count, np.int64)
    low, high = 0, count - 1
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
def climbed(seconds: Floats, order: Ints, end: float, forward: float, rounds: int) -> float:
    """Improve an order in place by swapping two micro-batches, while that helps and `rounds` last."""
    count = len(order)
    for _ in range(rounds):
        found = False
        for i in range(count - 1):
            for j in range(i + 1, count):
                order[i], order[j] = order[j], order[i]
                swapped = one_f_one_b(seconds, order, forward)
                if swapped < end * (1 - 1e-12):
                    end, found = swapped, True
                else:
                    order[i], order[j] = order[j], order[i]
        if not found:
            break
    return end


@compiled
def best_order(seconds: Floats, forward: float, climb: int) -> tuple[float, Ints]:
    """Return the end and the order of micro-batches that finish first among those tried.

    Tried are the given order, descending and ascending ones, the largest in the middle and at both ends; each is
    improved by at most `climb` rounds of swapping.
    """
    stages, count = seconds.shape
    best_order = np.arange(count)
    best = one_f_one_b(seconds, best_order, forward)
    if stages == 1 or count < 2:
        return best, best_order
    descending = longest_to_shortest(seconds)
    best = climbed(seconds, best_order, best, forward, climb)
    for shape in range(4):
        trial = starting_order(descending, shape)
        end = climbed(seconds, trial, one_f_one_b(seconds, trial, forward), forward, climb)
        if end < best:
            best, best_order = end, trial
    return best, best_order


def published_seconds(costs: Sequence[float], stages: int) -> float:
    """Return the estimate: the sum of micro-batches + (PP - 1) times the largest."""
    return sum(costs) + (stages - 1) * max(costs) if costs else 0.0


def pipeline_seconds(costs: Sequence[float], stages: int, forward: float = FORWARD) -> float:
    """Return the 1F1B recurrence of micro-batches, in their order, on stages that take the same time.

    Args:
        costs: seconds of one stage for each micro-batch, forward and backward.
        stages: PP.
    """
    if not len(costs):
        return 0.0
    row = np.asarray(costs, dtype=np.float64)
    return float(one_f_one_b(equal_stages(row, stages), np.arange(len(row)), forward))

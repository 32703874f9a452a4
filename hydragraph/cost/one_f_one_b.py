"""The exact end of a 1F1B pipeline with unequal micro-batches, and the order of micro-batches that ends first.

    S              stages (PP)
    V              micro-batches; `count` in code
    seconds[s, m]  [S, V]  forward and backward of micro-batch m on stage s
    order          [V]     the micro-batches in the order in which every stage runs them
    F(s, m)        when the forward of m ends on stage s; `ends_f`, below 0 while it is not known
    B(s, m)        when its backward ends there; `ends_b`

The recurrence: a stage runs one computation at a time, and each begins when the stage is free and its input is ready:

    F(s, m) = max(end of what s did before, F(s - 1, m)) + forward's part of seconds[s, m]
    B(s, m) = max(end of what s did before, B(s + 1, m)) + the rest of them;  the last stage waits for F(s, m) instead

Example: two stages, micro-batches of 3 and 6 seconds on each; the forward is a third.

    stage 0  F0 0-1, F1 1-3, B0 4-6, B1 10-14  two forwards ahead of the backwards, at most
    stage 1  F0 1-2, B0 2-4, F1 4-6, B1 6-10   one
    it ends at 14; the estimate, 3 + 6 + (2 - 1) 6 = 15, is above it

Equations of Hydraulis -> functions:

    Appendix D.1, sum_j cost_j + (PP - 1) max_j cost_j  `published_seconds`
    what it estimates, the end of 1F1B itself (ours)    `one_f_one_b`, `pipeline_seconds`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.kernels.numba_compiler import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The forward's fraction of a micro-batch's time on a stage: backward computes two products for each of forward's.
FORWARD = 1 / 3


@compiled
def one_f_one_b(seconds: Floats, order: Ints, forward: float) -> float:
    """Return when the last backward of the first stage ends.

    A stage s of S runs min(S - 1 - s, V) forwards, then a forward and a backward in turn, then what backwards remain;
    a forward waits for its own on the stage before, a backward for its own on the stage after.

    Args:
        seconds: forward and backward of each micro-batch on each stage [S, V].
        order: order of the micro-batches, on all stages.
        forward: the forward's fraction of them.
    """
    stages, count = seconds.shape
    ends_f = np.full((stages, count), -1.0)
    ends_b = np.full((stages, count), -1.0)
    clock = np.zeros(stages)  # when each stage is free
    done_f = np.zeros(stages, np.int64)
    done_b = np.zeros(stages, np.int64)
    left = 2 * stages * count
    # No queue of events: each stage continues until it waits for a neighbour, round after round. Every round makes
    # progress, since under 1F1B stages never all wait for one another.
    while left:
        for s in range(stages):
            while done_b[s] < count:
                ahead = min(stages - s, count)  # micro-batches whose forward may be done before their backward
                # 1F1B: forwards until the number in flight equals the number of stages from here on, then one per
                # backward.
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
    """Return [S, V] for stages that take the same time."""
    result = np.empty((stages, len(costs)))
    for s in range(stages):
        for j in range(len(costs)):
            result[s, j] = costs[j]
    return result


@compiled
def longest_to_shortest(seconds: Floats) -> Ints:
    """Return the micro-batches ordered by their seconds on all stages, descending."""
    stages, count = seconds.shape
    descending = np.arange(count)
    totals = np.zeros(count)
    for j in range(count):
        for s in range(stages):
            totals[j] += seconds[s, j]
        # Insertion sort is stable, which numba's default sort does not promise.
        at = j
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
    # Filled alternately from both ends, the last ones lie in the middle: the largest if the smallest come first.
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
def climbed(seconds: Floats, order: Ints, end: float, forward: float, rounds: int) -> float:
    """Improve an order in place by swaps of micro-batches, for at most `rounds` while that helps; return its end."""
    count = len(order)
    # The end has no formula in the order, so every swap is tried by running the recurrence, and undone if it is worse.
    for _ in range(rounds):
        improved = False
        for i in range(count - 1):
            for j in range(i + 1, count):
                order[i], order[j] = order[j], order[i]
                swapped = one_f_one_b(seconds, order, forward)
                if swapped < end * (1 - 1e-12):
                    end = swapped
                    improved = True
                else:
                    order[i], order[j] = order[j], order[i]
        if not improved:
            break
    return end


@compiled
def best_order(seconds: Floats, forward: float, climb: int) -> tuple[float, Ints]:
    """Return the end and the order of micro-batches that finish first among those tried.

    These are the given order, descending and ascending ones, the largest in the middle and at both ends; each is
    improved by at most `climb` rounds of swapping.

    Args:
        seconds: forward and backward of each micro-batch on each stage [S, V].
        forward: the forward's fraction of them.
        climb: number of rounds.
    """
    stages, count = seconds.shape
    best_order = np.arange(count)
    best = one_f_one_b(seconds, best_order, forward)
    if stages == 1 or count < 2:
        return best, best_order
    # Neither order is best for all: with few micro-batches the first and the last count most, because nothing hides
    # the stages' filling and draining; so orders that put small or large ones there are where climbing starts.
    descending = longest_to_shortest(seconds)
    best = climbed(seconds, best_order, best, forward, climb)
    for shape in range(4):
        trial = starting_order(descending, shape)
        end = climbed(seconds, trial, one_f_one_b(seconds, trial, forward), forward, climb)
        if end < best:
            best = end
            best_order = trial
    return best, best_order


def published_seconds(costs: Sequence[float], stages: int) -> float:
    """Return the estimate of Appendix D.1: the sum of micro-batches + (PP - 1) times the largest."""
    return sum(costs) + (stages - 1) * max(costs) if costs else 0.0


def pipeline_seconds(costs: Sequence[float], stages: int, forward: float = FORWARD) -> float:
    """Return the end of the 1F1B recurrence for micro-batches, in their order, on stages that take the same time.

    Args:
        costs: seconds of one stage for each micro-batch, forward and backward.
        stages: PP.
        forward: the forward's fraction of those seconds.
    """
    if not len(costs):
        return 0.0
    row = np.asarray(costs, dtype=np.float64)
    return float(one_f_one_b(equal_stages(row, stages), np.arange(len(row)), forward))

"""Packing of one pipeline's sequences into micro-batches (compiled).

    n        sequences of the pipeline, sorted by length, descending
    V        number of micro-batches; `count` in code
    work[i]  [n]  a l^2 + b l: seconds of sequence i on one stage
    c        fixed seconds of a micro-batch
    PP       stages
    placed   [n]  the micro-batch of each sequence; -1: none

V micro-batches are like V equal pipelines that accept at most MaxLen tokens, so `local_search` assigns sequences to
them.

Hydraulis's equations -> functions:

    Eq. 1, (PP - 1 + V) max_j cost_j                          `price` with EQ1
    Appendix D.1, sum_j cost_j + (PP - 1) max_j cost_j        `price` with SUM
    Appendix C, the range of V                                `form`
"""

from __future__ import annotations

import math

import numpy as np

from hydragraph.cost.micro_batch_order import largest_in_middle
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.assignment.local_search import (
    BUBBLE,
    COLUMNS,
    MAX_LEN,
    MODE,
    OVERHEAD,
    SINGLE,
    UTIL_LEN,
    AssignmentArrays,
    Floats,
    Ints,
    descend,
    kick,
    longest_first,
)

KICKED = 3
ENOUGH = 1e-3
EQ1 = 0
SUM = 1


@compiled
def price(objective: int, largest: float, total: float, count: float, terms: Floats) -> float:
    bubble = terms[BUBBLE]
    c = terms[OVERHEAD]
    if objective == EQ1:
        return float((largest + c) * (bubble + count))
    return float(total + c * count + bubble * (largest + c))


@compiled
def largest_at_least(work: Floats, count: int) -> float:
    """Return a lower bound on the work of the largest of `count` micro-batches.

    For example, three of the 2 count + 1 largest sequences must share a micro-batch.
    """
    n = len(work)
    bound = max(work[0], work.sum() / count)
    # `together` of the (together - 1) * count + 1 largest sequences share a micro-batch.
    for together in range(2, 5):
        last = (together - 1) * count
        if last >= n:
            break
        shared = 0.0
        for k in range(together):
            shared += work[last - k]
        bound = max(bound, shared)
    return bound


@compiled
def spread_evenly(work: Floats, lengths: Floats, count: int, max_len: float) -> Ints:
    """Return each sequence's micro-batch; -1: the sequence does not fit."""
    instance = as_pipelines(work, lengths, count, max_len)
    start = np.zeros(count, np.int64)
    placed = longest_first(instance, start, False)
    if placed.min() < 0:
        placed = longest_first(instance, start, True)
    if placed.min() >= 0:
        descend(placed, instance, np.zeros(count))
    return placed


@compiled
def as_pipelines(work: Floats, lengths: Floats, count: int, max_len: float) -> AssignmentArrays:
    terms = np.zeros((1, COLUMNS))
    terms[0, MAX_LEN] = max_len
    terms[0, MODE] = SINGLE
    return AssignmentArrays(work.reshape(-1, 1), lengths, np.zeros(count, np.int64), terms)


@compiled
def priced(placed: Ints, work: Floats, count: int, objective: int, terms: Floats) -> float:
    if placed.min() < 0:
        return np.inf
    return price(objective, np.bincount(placed, work, count).max(), work.sum(), count, terms)


@compiled
def form(work: Floats, lengths: Floats, terms: Floats, objective: int, kicks: int) -> tuple[float, float, int, Ints]:
    """Return the best packing: seconds, lower bound, V, and each sequence's micro-batch.

    V is between ceil(sum l / MaxLen) and floor(sum l / UtilLen) (Appendix C), or larger if none suffices. The best
    values of V get `kicks` random moves each.
    """
    n = len(work)
    total = work.sum()
    max_len = terms[MAX_LEN]
    low = max(1, math.ceil(lengths.sum() / max_len))
    high = min(max(low, int(lengths.sum() // terms[UTIL_LEN])), n)
    bounds = np.array([price(objective, largest_at_least(work, v), total, v, terms) for v in range(low, high + 1)])
    tried = np.full((KICKED, n), -1, np.int64)
    kept = np.full(KICKED, -1)
    values = np.full(len(bounds), np.inf)
    best = np.inf
    open_bounds = bounds.copy()
    # Values of V in order of lower bounds, until no bound is below the best result.
    for _ in range(len(bounds)):
        at = np.argmin(open_bounds)
        if open_bounds[at] >= best * (1 - 1e-9):
            break
        open_bounds[at] = np.inf
        placed = spread_evenly(work, lengths, low + at, max_len)
        values[at] = priced(placed, work, low + at, objective, terms)
        best = min(best, values[at])
        for k in range(KICKED):
            if kept[k] < 0 or (values[at], at) < (values[kept[k]], kept[k]):
                kept[k + 1 :] = kept[k:-1].copy()
                tried[k + 1 :] = tried[k:-1].copy()
                kept[k] = at
                tried[k] = placed
                break
    # Random moves reduce the largest micro-batch, irrelevant for SUM with one stage.
    if objective == EQ1 or terms[BUBBLE] > 0:
        for k in range(KICKED):
            at = kept[k]
            if at >= 0 and values[at] < np.inf and bounds[at] < best * (1 - ENOUGH):
                enough = largest_at_least(work, low + at) * (1 + ENOUGH)
                kick(tried[k], as_pipelines(work, lengths, low + at, max_len), np.zeros(low + at), kicks, enough, 1)
                values[at] = priced(tried[k], work, low + at, objective, terms)
                best = min(best, values[at])
    at = int(np.argmin(values))
    if best < np.inf:
        for k in range(KICKED):
            if kept[k] == at:
                return values[at], min(bounds.min(), values[at]), low + at, tried[k]
    # V may have to be larger: three sequences of 3 tokens need V = 3 if MaxLen is 5, although 9 < 2
    # * 5.
    for count in range(high + 1, n + 1):
        placed = spread_evenly(work, lengths, count, max_len)
        if placed.min() >= 0:
            seconds = priced(placed, work, count, objective, terms)
            return seconds, min(bounds.min(), seconds), count, placed
    return np.inf, np.inf, 0, tried[0]


@compiled
def form_in_order(
    work: Floats, lengths: Floats, terms: Floats, objective: int, kicks: int
) -> tuple[float, float, int, Ints]:
    """Return the result of `form` without empty micro-batches, ordered with the largest in the middle."""
    best, bound, count, placed = form(work, lengths, terms, objective, kicks)
    if count == 0:
        return best, bound, 0, placed
    used = np.bincount(placed, minlength=count) > 0
    # Without empty micro-batches
    number = np.cumsum(used) - 1
    position = largest_in_middle(np.bincount(placed, work, count)[used])
    return best, bound, number[-1] + 1, position[number[placed]]

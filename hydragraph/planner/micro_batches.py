"""Cut one pipeline's sequences into micro-batches (compiled): try every number V that the bound does not exclude."""

from __future__ import annotations

import math

import numpy as np

from hydragraph.planner.compiled import compiled
from hydragraph.planner.local_search import MAX_LEN, MODE, SINGLE, Floats, Ints, descend, kick, longest_first
from hydragraph.planner.one_f_one_b import FORWARD, best_order, equal_stages

KICKED = 3  # of the numbers V tried, the best are searched further
ENOUGH = 1e-3  # above the bound, as a part of it, is as good as the bound
EQ1, SUM = 0, 1  # (PP - 1 + V) max_j cost_j, or sum_j cost_j + (PP - 1) max_j cost_j


@compiled
def price(objective: int, largest: float, total: float, count: float, stages: int, c: float) -> float:
    """Return the seconds of `count` micro-batches, of which the largest has this much work."""
    if objective == EQ1:
        return (largest + c) * (stages - 1 + count)
    return total + c * count + (stages - 1) * (largest + c)


@compiled
def largest_at_least(work: Floats, count: int) -> float:
    """Return a bound on the largest of `count` micro-batches: the mean, and what must share one by the pigeonhole.

    Args:
        work: descending, as lengths are.
    """
    n = len(work)
    bound = max(work[0], work.sum() / count)
    for together in range(2, 5):
        last = (together - 1) * count
        if last >= n:
            break
        shared = 0.0
        for k in range(together):  # the least work of `together` among the last + 1 largest
            shared += work[last - k]
        bound = max(bound, shared)
    return bound


@compiled
def spread_evenly(work: Floats, lengths: Floats, count: int, max_len: float) -> Ints:
    """Return a micro-batch for each sequence (longest first), -1 for those that no longer fit."""
    cost, kind, shape = as_pipelines(work, count, max_len)
    start = np.zeros(count, np.int64)
    placed = longest_first(cost, lengths, kind, shape, start, False)
    if placed.min() < 0:
        placed = longest_first(cost, lengths, kind, shape, start, True)
    if placed.min() >= 0:
        descend(placed, cost, lengths, kind, shape, np.zeros(count))
    return placed


@compiled
def kick_evenly(
    placed: Ints, work: Floats, lengths: Floats, count: int, max_len: float, kicks: int, enough: float
) -> None:
    """Improve a spread in place."""
    cost, kind, shape = as_pipelines(work, count, max_len)
    kick(placed, cost, lengths, kind, shape, np.zeros(count), kicks, enough, 1)


@compiled
def as_pipelines(work: Floats, count: int, max_len: float) -> tuple[Floats, Ints, Floats]:
    """Return micro-batches as pipelines of one kind that take at most MaxLen tokens."""
    shape = np.zeros((1, 8))
    shape[0, MAX_LEN] = max_len
    shape[0, MODE] = SINGLE
    return work.reshape(-1, 1), np.zeros(count, np.int64), shape


@compiled
def priced(placed: Ints, work: Floats, count: int, objective: int, stages: int, c: float) -> float:
    """Return the seconds of a packing, infinite where a sequence has no micro-batch."""
    if placed.min() < 0:
        return np.inf
    loads = np.zeros(count)
    for i in range(len(work)):
        loads[placed[i]] += work[i]
    return price(objective, loads.max(), work.sum(), count, stages, c)


@compiled
def form(
    work: Floats, lengths: Floats, shape: Floats, stages: int, c: float, util_len: float, objective: int, kicks: int
) -> tuple[float, float, int, Ints]:
    """Return the best packing of one pipeline: seconds, their lower bound, V, and each sequence's micro-batch.

    V is tried from ceil(sum l / MaxLen) to floor(sum l / UtilLen) (Eq. 1), best bound first, and above only where no
    packing was found.
    """
    n, total, max_len = len(work), work.sum(), shape[MAX_LEN]
    low = max(1, math.ceil(lengths.sum() / max_len))
    high = min(max(low, int(lengths.sum() // util_len)), n)
    bounds = np.empty(high - low + 1)
    for v in range(low, high + 1):
        bounds[v - low] = price(objective, largest_at_least(work, v), total, v, stages, c)
    tried = np.full((len(bounds), n), -1, np.int64)
    values = np.full(len(bounds), np.inf)
    best, open_bounds = np.inf, bounds.copy()
    for _ in range(len(bounds)):
        at = np.argmin(open_bounds)
        if open_bounds[at] >= best * (1 - 1e-9):
            break
        open_bounds[at] = np.inf
        tried[at] = spread_evenly(work, lengths, low + at, max_len)
        values[at] = priced(tried[at], work, low + at, objective, stages, c)
        best = min(best, values[at])
    if objective == EQ1 or stages > 1:
        open_values = values.copy()
        for _ in range(min(KICKED, len(values))):
            at = np.argmin(open_values)
            if open_values[at] < np.inf and bounds[at] < best * (1 - ENOUGH):
                enough = largest_at_least(work, low + at) * (1 + ENOUGH)
                kick_evenly(tried[at], work, lengths, low + at, max_len, kicks, enough)
                values[at] = priced(tried[at], work, low + at, objective, stages, c)
                best = min(best, values[at])
            open_values[at] = np.inf
    at = np.argmin(values)
    if best < np.inf:
        return values[at], min(bounds.min(), values[at]), low + at, tried[at]
    for count in range(high + 1, n + 1):  # capacity is too tight for the numbers of Eq. 1
        placed = spread_evenly(work, lengths, count, max_len)
        if placed.min() >= 0:
            found = priced(placed, work, count, objective, stages, c)
            return found, min(bounds.min(), found), count, placed
    return np.inf, np.inf, 0, tried[0]


@compiled
def form_in_order(
    work: Floats,
    lengths: Floats,
    shape: Floats,
    stages: int,
    c: float,
    util_len: float,
    objective: int,
    kicks: int,
    climb: int,
) -> tuple[float, float, int, Ints, float]:
    """Return what `form` returns, the micro-batches numbered in the order in which 1F1B ends first, and that end."""
    best, bound, count, placed = form(work, lengths, shape, stages, c, util_len, objective, kicks)
    if count == 0:
        return best, bound, 0, placed, np.inf
    used = np.zeros(count, np.bool_)
    costs = np.full(count, c)
    for i in range(len(work)):
        costs[placed[i]] += work[i]
        used[placed[i]] = True
    number, filled = np.zeros(count, np.int64), 0
    for j in range(count):
        if used[j]:
            costs[filled], number[j] = costs[j], filled
            filled += 1
    end, order = best_order(equal_stages(costs[:filled], stages), FORWARD, climb)
    rank = np.empty(len(order), np.int64)
    for at in range(len(order)):
        rank[order[at]] = at
    for i in range(len(work)):
        placed[i] = rank[number[placed[i]]]
    return best, bound, len(order), placed, end

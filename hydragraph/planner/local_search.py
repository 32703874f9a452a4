"""Spread work over pipelines that differ in kind: longest first, then local search with kicks (compiled by numba).

A *kind* is a set of equal pipelines. Items are sorted by length, descending, so that the longest of a set is its least
index. `cost[i, t]` are the seconds of item i on a pipeline of kind t, infinite where it does not fit. A pipeline with
load S, W tokens and longest item h finishes at `finish(...)`; `shape[t]` says how:

    BUBBLE: PP - 1                    QUADRATIC, LINEAR, OVERHEAD: a, b and c of T(l)
    FIXED: seconds to add             MAX_LEN, UTIL_LEN: tokens of a micro-batch
    MODE: EQ3, FORMED (it is cut into micro-batches) or SINGLE (it is one micro-batch itself)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hydragraph.planner.compiled import compiled

BUBBLE, FIXED, QUADRATIC, LINEAR, OVERHEAD, MAX_LEN, UTIL_LEN, MODE = range(8)
EQ3, FORMED, SINGLE = 0.0, 1.0, 2.0
NEAR = 16  # pipelines that local search looks at first

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def finish(shape: Floats, load: float, tokens: float, longest: float) -> float:
    """Return when a pipeline finishes.

    EQ3: load + fixed + (PP - 1) T(longest). SINGLE: load, infinite beyond MaxLen. FORMED: fixed + the least over V of
    load + c V + (PP - 1) (max(load / V, a longest^2 + b longest) + c), as if load could be cut into V equal parts.
    """
    if tokens <= 0.0:
        return 0.0
    single = (shape[QUADRATIC] * longest + shape[LINEAR]) * longest
    bubble, c = shape[BUBBLE], shape[OVERHEAD]
    if shape[MODE] == EQ3:
        return load + shape[FIXED] + bubble * (single + c)
    if shape[MODE] == SINGLE:
        return load if tokens <= shape[MAX_LEN] else np.inf
    low = max(1.0, math.ceil(tokens / shape[MAX_LEN]))
    high = max(low, math.floor(tokens / shape[UTIL_LEN]))
    if bubble == 0.0:
        best = low
    else:
        best = load / single  # more micro-batches than this do not shorten the bubble
        if c > 0.0:
            best = min(best, math.sqrt(bubble * load / c))
        best = min(max(best, low), high)
    below = min(max(math.floor(best), low), high)
    result = load + c * below + bubble * (max(load / below, single) + c)
    if below < best:
        above = min(below + 1.0, high)
        result = min(result, load + c * above + bubble * (max(load / above, single) + c))
    return result + shape[FIXED]


@compiled
def state_of(
    placed: Ints, cost: Floats, lengths: Floats, kind: Ints, loads: Floats, tokens: Floats, first: Ints, second: Ints
) -> None:
    """Fill load, tokens, longest and second longest item (n: none) of each pipeline."""
    n = len(placed)
    loads[:] = 0.0
    tokens[:] = 0.0
    first[:] = n
    second[:] = n
    for i in range(n):
        p = placed[i]
        if p < 0:
            continue
        loads[p] += cost[i, kind[p]]
        tokens[p] += lengths[i]
        if first[p] == n:
            first[p] = i
        elif second[p] == n:
            second[p] = i


@compiled
def longest_first(cost: Floats, lengths: Floats, kind: Ints, shape: Floats, start: Ints, fullest: bool) -> Ints:
    """Put each item, longest first, where it finishes first; -1 where it fits nowhere.

    Of each kind, only the pipeline that finishes first so far is looked at.

    Args:
        start: pipeline p takes items from start[p] on only.
        fullest: put it where least room is left instead.
    """
    pipelines, n, kinds = len(kind), len(lengths), len(shape)
    loads, tokens, first, ends = np.zeros(pipelines), np.zeros(pipelines), np.zeros(pipelines), np.zeros(pipelines)
    placed = np.full(n, -1, np.int64)
    front, least = np.empty(kinds, np.int64), np.empty(kinds)
    for i in range(n):
        front[:] = -1  # of each kind, the pipeline that finishes first now
        least[:] = np.inf
        for p in range(pipelines):
            t = kind[p]
            if cost[i, t] == np.inf or i < start[p]:
                continue
            if shape[t, MODE] == SINGLE and tokens[p] + lengths[i] > shape[t, MAX_LEN]:
                continue
            key = -tokens[p] if fullest else ends[p]
            if key < least[t]:
                least[t], front[t] = key, p
        best, where = np.inf, -1
        for t in range(kinds):
            p = front[t]
            if p < 0:
                continue
            value = finish(shape[t], loads[p] + cost[i, t], tokens[p] + lengths[i], max(first[p], lengths[i]))
            if value < best:
                best, where = value, p
        if where < 0:
            continue
        placed[i], ends[where] = where, best
        loads[where] += cost[i, kind[where]]
        tokens[where] += lengths[i]
        first[where] = max(first[where], lengths[i])
    return placed


@compiled
def quick_end(cost: Floats, lengths: Floats, kind: Ints, shape: Floats) -> float:
    """Return when the last pipeline finishes if each item, longest first, is put where it finishes first."""
    pipelines, n = len(kind), len(lengths)
    placed = longest_first(cost, lengths, kind, shape, np.zeros(pipelines, np.int64), False)
    loads, tokens = np.zeros(pipelines), np.zeros(pipelines)
    first, second = np.zeros(pipelines, np.int64), np.zeros(pipelines, np.int64)
    state_of(placed, cost, lengths, kind, loads, tokens, first, second)
    last = 0.0
    for p in range(pipelines):
        if first[p] < n:
            last = max(last, finish(shape[kind[p]], loads[p], tokens[p], lengths[first[p]]))
    return last


@compiled
def greedy(
    orders: Ints, cost: Floats, lengths: Floats, kind: Ints, shape: Floats, least_loaded: bool
) -> tuple[float, Ints]:
    """Alg. 1: in each shuffled order, put an item where the global maximum grows least; keep the best trial.

    Args:
        orders: [trials, n].
        least_loaded: how ties are broken, which nearly all are: to the least loaded, or to the first pipeline.
    """
    pipelines, n = len(kind), len(lengths)
    best_value, best_placed = np.inf, np.full(n, -1, np.int64)
    for trial in range(len(orders)):
        loads, tokens, first = np.zeros(pipelines), np.zeros(pipelines), np.zeros(pipelines)
        placed = np.full(n, -1, np.int64)
        top = 0.0
        for i in orders[trial]:
            value, tie, where = np.inf, np.inf, -1
            for p in range(pipelines):
                t = kind[p]
                if cost[i, t] == np.inf:
                    continue
                after = finish(shape[t], loads[p] + cost[i, t], tokens[p] + lengths[i], max(first[p], lengths[i]))
                grown = max(top, after)
                second = after if least_loaded else 0.0
                if grown < value or (grown == value and second < tie):
                    value, tie, where = grown, second, p
            if where >= 0:
                placed[i], top = where, value
                loads[where] += cost[i, kind[where]]
                tokens[where] += lengths[i]
                first[where] = max(first[where], lengths[i])
        if top < best_value:
            best_value, best_placed = top, placed
    return best_value, best_placed


@compiled
def earliest(ends: Floats, count: int) -> float:
    """Return the end that `count` pipelines do not exceed."""
    found = -np.inf
    seen = 0
    while seen < count:
        following = np.inf
        for end in ends:
            if found < end < following:
                following = end
        found = following
        for end in ends:
            if end == found:
                seen += 1
    return found


@compiled
def descend(placed: Ints, cost: Floats, lengths: Floats, kind: Ints, shape: Floats, extra: Floats) -> float:
    """Improve in place: move one item away from the last pipeline to finish, or swap two, while that helps.

    Args:
        extra: seconds to add to each pipeline [P], as learned from packing; zeros elsewhere.

    Returns:
        When the last pipeline finishes.
    """
    pipelines, n = len(kind), len(placed)
    loads, tokens = np.zeros(pipelines), np.zeros(pipelines)
    first, second = np.zeros(pipelines, np.int64), np.zeros(pipelines, np.int64)
    ends = np.zeros(pipelines)
    state_of(placed, cost, lengths, kind, loads, tokens, first, second)
    for q in range(pipelines):
        longest = lengths[first[q]] if first[q] < n else 0.0
        ends[q] = extra[q] + finish(shape[kind[q]], loads[q], tokens[q], longest)
    near = True  # look at the pipelines that finish first only, as long as that helps
    while True:
        p = 0
        for q in range(pipelines):
            if ends[q] > ends[p]:
                p = q
        horizon = earliest(ends, NEAR) if near and pipelines > NEAR else np.inf
        now = ends[p]
        best, item, other, target = now * (1.0 - 1e-12), -1, -1, -1
        tp = kind[p]
        for i in range(n):
            if placed[i] != p:
                continue
            rest = second[p] if i == first[p] else first[p]
            left = loads[p] - cost[i, tp]
            after = extra[p] + finish(shape[tp], left, tokens[p] - lengths[i], lengths[rest] if rest < n else 0.0)
            if after < best:
                for q in range(pipelines):
                    t = kind[q]
                    if q == p or ends[q] > horizon or ends[q] + cost[i, t] >= best:
                        continue
                    longest = lengths[min(first[q], i)]
                    value = max(
                        after, extra[q] + finish(shape[t], loads[q] + cost[i, t], tokens[q] + lengths[i], longest)
                    )
                    if value < best:
                        best, item, other, target = value, i, -1, q
            for k in range(i + 1, n):  # shorter ones only
                q = placed[k]
                if q == p or q < 0 or ends[q] > horizon:
                    continue
                t = kind[q]
                if ends[q] + cost[i, t] - cost[k, t] >= best or cost[k, tp] == np.inf:
                    continue
                added, mine = loads[q] + cost[i, t] - cost[k, t], min(rest, k)
                value = extra[p] + finish(
                    shape[tp], left + cost[k, tp], tokens[p] - lengths[i] + lengths[k], lengths[mine]
                )
                if value >= best:
                    continue
                theirs = min(second[q] if k == first[q] else first[q], i)
                value = max(
                    value, extra[q] + finish(shape[t], added, tokens[q] + lengths[i] - lengths[k], lengths[theirs])
                )
                if value < best:
                    best, item, other, target = value, i, k, q
        if item < 0:
            if not near or pipelines <= NEAR:
                return now
            near = False
            continue
        near = True
        placed[item] = target
        if other >= 0:
            placed[other] = p
        for q in (p, target):
            loads[q], tokens[q], first[q], second[q] = 0.0, 0.0, n, n
        for i in range(n):
            q = placed[i]
            if q in (p, target):
                loads[q] += cost[i, kind[q]]
                tokens[q] += lengths[i]
                if first[q] == n:
                    first[q] = i
                elif second[q] == n:
                    second[q] = i
        for q in (p, target):
            longest = lengths[first[q]] if first[q] < n else 0.0
            ends[q] = extra[q] + finish(shape[kind[q]], loads[q], tokens[q], longest)


@compiled
def kick(
    placed: Ints,
    cost: Floats,
    lengths: Floats,
    kind: Ints,
    shape: Floats,
    extra: Floats,
    kicks: int,
    enough: float,
    seed: int,
) -> float:
    """Iterated local search, in place: throw a few items elsewhere, descend again, keep what is no worse.

    Args:
        kicks: how often.
        enough: stop at this many seconds.
        seed: the same seed gives the same result.
    """
    np.random.seed(seed)
    pipelines, n = len(kind), len(placed)
    value = descend(placed, cost, lengths, kind, shape, extra)
    if pipelines < 2 or n < 2:
        return value
    trial = placed.copy()
    best = value
    kept = placed.copy()
    for _ in range(kicks):
        if best <= enough:
            break
        trial[:] = placed
        for _ in range(4 + np.random.randint(5)):
            i, q = np.random.randint(n), np.random.randint(pipelines)
            if trial[i] >= 0 and cost[i, kind[q]] < np.inf:
                trial[i] = q
        found = descend(trial, cost, lengths, kind, shape, extra)
        if found <= value:
            value = found
            placed[:] = trial
            if found < best:
                best = found
                kept[:] = trial
    placed[:] = kept
    return best


@compiled
def rounded(shares: Floats) -> NDArray[np.bool_]:
    """Return one kind per item, such that neighbours together get what their shares [n, K] say.

    Walking along the items, each takes the kind that is furthest behind.
    """
    n, kinds = shares.shape
    allowed = np.zeros((n, kinds), np.bool_)
    owed = np.zeros(kinds)
    for i in range(n):
        chosen = 0
        for t in range(kinds):
            owed[t] += shares[i, t]
            if shares[i, t] > 1e-9 and (shares[i, chosen] <= 1e-9 or owed[t] > owed[chosen]):
                chosen = t
        owed[chosen] -= 1.0
        allowed[i, chosen] = True
    return allowed

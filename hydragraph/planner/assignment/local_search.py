"""Assignment of sequences to pipelines: longest first, then local search with random moves, or kicks (compiled).

    n  sequences, sorted by length, descending
    P  pipelines
    K  kinds of equal pipelines

    cost[i, t]   [n, K]  seconds of sequence i on a pipeline of kind t; infinite if it does not fit
    lengths[i]   [n]     tokens of sequence i
    kind_of[p]   [P]     kind of pipeline p
    terms[t]     [K, 8 + 3 W]  coefficients of the end time of a pipeline of kind t; see `finish`
    placed[i]    [n]     pipeline of sequence i; -1: none
    ends[p]      [P]     end time of pipeline p

A pipeline's end time depends only on its work, its tokens and its longest sequence.

Hydraulis's equations -> functions:

    Eq. 2, minimum time of a pipeline                  `finish` in mode EQ3
    Eq. 1, for V equal micro-batches                   `finish` in mode FORMED, for the best V
    Eq. 3, the last pipeline's end time                `quick_end`; reduced by `descend` and `kick`
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.stage_arrays import pairs_of
from hydragraph.kernels.numba_compiler import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Columns of `terms`.
BUBBLE = 0  # PP - 1 for a pipeline of PP stages
# Seconds added to the end time
FIXED = 1
# Coefficients a, b, c of T(l) = a l^2 + b l + c
QUADRATIC = 2
LINEAR = 3
OVERHEAD = 4
MAX_LEN = 5
# Desired minimum tokens in a micro-batch
UTIL_LEN = 6
MODE = 7
# Next columns, for each of W reaches (`cost.reach`): window, chunk, seconds per pair
COLUMNS = 8

EQ3 = 0.0
FORMED = 1.0
SINGLE = 2.0

NEAR = 16
# Minimum relative gain of a step, so that rounding cannot keep the search running.
LEAST_GAIN = 1e-12
# Minimum relative gain for more than MANY sequences (slower steps).
MANY = 4096
LEAST_OF_MANY = 1e-4


class AssignmentArrays(NamedTuple):
    cost: Floats
    lengths: Floats
    kind_of: Ints
    terms: Floats


class SearchState(NamedTuple):
    """Each pipeline's arguments of `finish` and end time [P].

    Attributes:
        longest, second: indices of each pipeline's two longest sequences; n if there is none.
    """

    loads: Floats
    tokens: Floats
    longest: Ints
    second: Ints
    ends: Floats


@partial(compiled, shared=True)
def finish(terms: Floats, load: float, tokens: float, longest: float) -> float:
    """Return a pipeline's end time by its mode's formula.

    EQ3     load + fixed + (PP - 1) T(longest)
    SINGLE  load; infinite above MaxLen tokens
    FORMED  fixed + min over V of load + c V + (PP - 1) (max(load / V, a longest^2 + b longest) + c)
    """
    if tokens <= 0.0:
        return 0.0
    alone = (terms[QUADRATIC] * longest + terms[LINEAR]) * longest
    for w in range(COLUMNS, len(terms), 3):
        alone += terms[w + 2] * pairs_of(terms[w], terms[w + 1], longest)
    bubble = terms[BUBBLE]
    c = terms[OVERHEAD]
    if terms[MODE] == EQ3:
        return load + terms[FIXED] + bubble * (alone + c)
    if terms[MODE] == SINGLE:
        return load if tokens <= terms[MAX_LEN] else np.inf
    # Hydraulis, Appendix C: MaxLen gives the minimum of micro-batches, UtilLen the maximum.
    low = max(1.0, math.ceil(tokens / terms[MAX_LEN]))
    high = max(low, math.floor(tokens / terms[UTIL_LEN]))
    # Without a bubble (one stage), further micro-batches only add c.
    if bubble == 0.0:
        best = low
    else:
        # More micro-batches do not shorten the bubble
        best = load / alone
        if c > 0.0:
            # This V minimizes c V + (PP - 1) load / V
            best = min(best, math.sqrt(bubble * load / c))
        best = min(max(best, low), high)
    # Convex in V: the best integer is next to the best real number.
    below = min(max(math.floor(best), low), high)
    result = load + c * below + bubble * (max(load / below, alone) + c)
    if below < best:
        above = min(below + 1.0, high)
        result = min(result, load + c * above + bubble * (max(load / above, alone) + c))
    return result + terms[FIXED]


@compiled
def no_state(pipelines: int) -> SearchState:
    return SearchState(
        np.zeros(pipelines),
        np.zeros(pipelines),
        np.zeros(pipelines, np.int64),
        np.zeros(pipelines, np.int64),
        np.zeros(pipelines),
    )


@compiled
def recount(placed: Ints, instance: AssignmentArrays, extra: Floats, changed: Bools, state: SearchState) -> None:
    """Recompute the state of `changed` pipelines [P], add `extra` seconds [P] to their ends, and clear `changed`."""
    n = len(placed)
    # Recomputed, not updated sums make ends of equal assignments bitwise equal.
    state.loads[changed] = 0.0
    state.tokens[changed] = 0.0
    state.longest[changed] = n
    state.second[changed] = n
    for i in range(n):
        p = placed[i]
        if p < 0 or not changed[p]:
            continue
        state.loads[p] += instance.cost[i, instance.kind_of[p]]
        state.tokens[p] += instance.lengths[i]
        if state.longest[p] == n:
            state.longest[p] = i
        elif state.second[p] == n:
            state.second[p] = i
    for p in np.flatnonzero(changed):
        longest = instance.lengths[state.longest[p]] if state.longest[p] < n else 0.0
        terms = instance.terms[instance.kind_of[p]]
        state.ends[p] = extra[p] + finish(terms, state.loads[p], state.tokens[p], longest)
    changed[:] = False


@compiled
def ends_of(placed: Ints, instance: AssignmentArrays) -> Floats:
    pipelines = len(instance.kind_of)
    state = no_state(pipelines)
    recount(placed, instance, np.zeros(pipelines), np.ones(pipelines, np.bool_), state)
    return state.ends


@partial(compiled, shared=True)
def longest_first(instance: AssignmentArrays, start: Ints, fullest: bool) -> Ints:
    """Assign each sequence, longest first, to the pipeline that finishes it first; return the pipelines (-1: none).

    Args:
        start: index of the first sequence that each pipeline accepts [P].
        fullest: among equal pipelines, choose the one with most tokens.
    """
    cost = instance.cost
    lengths = instance.lengths
    kind_of = instance.kind_of
    terms = instance.terms
    n = len(lengths)
    pipelines = len(kind_of)
    kinds = len(terms)
    loads = np.zeros(pipelines)
    tokens = np.zeros(pipelines)
    longest = np.zeros(pipelines)  # in tokens
    ends = np.zeros(pipelines)
    placed = np.full(n, -1, np.int64)
    front = np.empty(kinds, np.int64)
    least = np.empty(kinds)
    for i in range(n):
        # Equal pipelines have equal formulas, so a sequence takes O(K), not O(P), evaluations.
        front[:] = -1
        least[:] = np.inf
        for p in range(pipelines):
            t = kind_of[p]
            if cost[i, t] == np.inf or i < start[p]:
                continue
            if terms[t, MODE] == SINGLE and tokens[p] + lengths[i] > terms[t, MAX_LEN]:
                continue
            # Of equal pipelines, the first to end is best, unless its longest sequence determines
            # its end.
            key = -tokens[p] if fullest else ends[p]
            if key < least[t]:
                least[t] = key
                front[t] = p
        first_end = np.inf
        chosen = -1
        for t in range(kinds):
            p = front[t]
            if p < 0:
                continue
            end = finish(terms[t], loads[p] + cost[i, t], tokens[p] + lengths[i], max(longest[p], lengths[i]))
            if end < first_end:
                first_end = end
                chosen = p
        # No pipeline accepts the sequence (-1).
        if chosen < 0:
            continue
        placed[i] = chosen
        ends[chosen] = first_end
        loads[chosen] += cost[i, kind_of[chosen]]
        tokens[chosen] += lengths[i]
        longest[chosen] = max(longest[chosen], lengths[i])
    return placed


@compiled
def quick_end(instance: AssignmentArrays) -> float:
    placed = longest_first(instance, np.zeros(len(instance.kind_of), np.int64), False)
    return max(0.0, ends_of(placed, instance).max())


@compiled
def _least_end(q: int, terms: Floats, extra: Floats, state: SearchState) -> float:
    """Return a lower bound on pipeline q's new end, without the added work and, in mode FORMED, without the bubble."""
    return extra[q] + state.loads[q] if terms[MODE] == FORMED else state.ends[q]


@compiled
def best_step(
    p: int, horizon: float, placed: Ints, instance: AssignmentArrays, extra: Floats, state: SearchState
) -> tuple[float, int, int, int]:
    """Return the step that most reduces max(end of p, end of q), where pipeline p finishes last.

    A step moves sequence i from p to q, or swaps it for a shorter sequence k. Pipelines that end after `horizon` are
    not tried as q.

    Returns:
        New max(end of p, end of q), i (-1: no step helps), k (-1: move), and q.
    """
    cost = instance.cost
    lengths = instance.lengths
    kind_of = instance.kind_of
    loads = state.loads
    tokens = state.tokens
    ends = state.ends
    n = len(placed)
    own = kind_of[p]
    best = ends[p] * (1.0 - (LEAST_OF_MANY if n > MANY else LEAST_GAIN))
    best_i = -1
    best_k = -1
    best_q = -1
    # Sequences of equal length are equal: try only the first of p's, and the first k of each q.
    tried = -1.0
    shorter = 0
    seen = np.empty(len(kind_of))
    for i in range(n):
        if placed[i] != p or lengths[i] == tried:
            continue
        tried = lengths[i]
        # shorter: first sequence shorter than i.
        while shorter < n and lengths[shorter] >= tried:
            shorter += 1
        # rest: p's longest sequence without i.
        rest = state.second[p] if i == state.longest[p] else state.longest[p]
        left = loads[p] - cost[i, own]
        longest = lengths[rest] if rest < n else 0.0
        end = extra[p] + finish(instance.terms[own], left, tokens[p] - lengths[i], longest)
        if end < best:
            for q in range(len(kind_of)):
                t = kind_of[q]
                if q == p or ends[q] > horizon or _least_end(q, instance.terms[t], extra, state) + cost[i, t] >= best:
                    continue
                longest = lengths[min(state.longest[q], i)]
                end_q = extra[q] + finish(instance.terms[t], loads[q] + cost[i, t], tokens[q] + lengths[i], longest)
                later = max(end, end_q)
                if later < best:
                    best = later
                    best_i = i
                    best_k = -1
                    best_q = q
        seen[:] = tried
        for k in range(shorter, n):
            q = placed[k]
            if q == p or q < 0 or ends[q] > horizon or seen[q] == lengths[k]:
                continue
            seen[q] = lengths[k]
            t = kind_of[q]
            more = cost[i, t] - cost[k, t]
            # The bound avoids most evaluations of `finish`, which dominate the time.
            if _least_end(q, instance.terms[t], extra, state) + more >= best or cost[k, own] == np.inf:
                continue
            grown = loads[q] + cost[i, t] - cost[k, t]
            longest = lengths[min(rest, k)]
            later = extra[p] + finish(
                instance.terms[own], left + cost[k, own], tokens[p] - lengths[i] + lengths[k], longest
            )
            if later >= best:
                continue
            longest = lengths[min(state.second[q] if k == state.longest[q] else state.longest[q], i)]
            end_q = extra[q] + finish(instance.terms[t], grown, tokens[q] + lengths[i] - lengths[k], longest)
            later = max(later, end_q)
            if later < best:
                best = later
                best_i = i
                best_k = k
                best_q = q
    return best, best_i, best_k, best_q


@partial(compiled, shared=True)
def descend(placed: Ints, instance: AssignmentArrays, extra: Floats) -> float:
    """Move or swap sequences of the last pipeline, in place, until no step helps; return the last end time."""
    pipelines = len(instance.kind_of)
    state = no_state(pipelines)
    changed = np.ones(pipelines, np.bool_)
    near = True
    while True:
        recount(placed, instance, extra, changed, state)
        last = np.argmax(state.ends)
        horizon = np.sort(state.ends)[NEAR - 1] if near and pipelines > NEAR else np.inf
        _, i, k, q = best_step(last, horizon, placed, instance, extra, state)
        if i >= 0:
            placed[i] = q
            if k >= 0:
                placed[k] = last
            changed[last] = True
            changed[q] = True
            near = True
        # No step to the first NEAR pipelines helps: try all.
        elif near and pipelines > NEAR:
            near = False
        else:
            return state.ends[last]


@partial(compiled, shared=True)
def kick(placed: Ints, instance: AssignmentArrays, extra: Floats, kicks: int, enough: float, seed: int) -> float:
    """Run iterated local search in place: move random sequences, `descend`, and undo both if the result is worse."""
    np.random.seed(seed)
    pipelines = len(instance.kind_of)
    n = len(placed)
    current = descend(placed, instance, extra)
    if pipelines < 2 or n < 2:
        return current
    trial = placed.copy()
    best = current
    best_placed = placed.copy()
    for _ in range(kicks):
        if best <= enough:
            break
        trial[:] = placed
        # Moves may make ends later; `descend` repairs most.
        for _ in range(4 + np.random.randint(5)):
            i = np.random.randint(n)
            p = np.random.randint(pipelines)
            if trial[i] >= 0 and instance.cost[i, instance.kind_of[p]] < np.inf:
                trial[i] = p
        end = descend(trial, instance, extra)
        if end <= current:
            current = end
            placed[:] = trial
            if end < best:
                best = end
                best_placed[:] = trial
    placed[:] = best_placed
    return best


@compiled
def rounded(shares: Floats) -> NDArray[np.bool_]:
    """Round `shares` to a mask [n, K]: each sequence gets the kind furthest below its share so far."""
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

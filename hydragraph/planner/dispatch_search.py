"""Search for the best spread of a mini-batch over pipelines, from several starts, against the proven bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hydragraph.planner import local_search
from hydragraph.planner.bound import Relaxation, relax
from hydragraph.planner.local_search import Floats, Ints
from hydragraph.planner.problem import Problem


@dataclass(frozen=True)
class Effort:
    """How long to search.

    Attributes:
        kicks: of the iterated local search, for up to 10 pipelines; fewer for more, as are the next two.
        trials: shuffles of Alg. 1; 0: leave it out.
        caps: starts in which pipelines refuse what is longer than a random length.
        enough: stop at this gap to the bound.
        rounds: of `assign`: spreading anew with what forming micro-batches taught.
    """

    kicks: int = 50
    trials: int = 100
    caps: int = 24
    enough: float = 1e-3
    rounds: int = 3


DESCENTS = 4  # of the best starts, local search improves so many
QUICK = Effort(kicks=0, trials=0, caps=0, rounds=1)


def bounded(given: Problem, cost: Floats, room: Callable[[float], Floats], start: Ints) -> Relaxation:
    """Return the relaxation, and no less than what the hardest single sequence takes.

    Args:
        cost: [n, K] no more than what a sequence adds to a pipeline.
        room: how much of it a pipeline of each kind [K] can take by z.
        start: any spread.
    """
    if not len(given.lengths):
        return Relaxation(0.0, given.cost)
    reached = value(given, start)
    found = relax(cost, lambda z: given.counts * room(z), reached)
    alone = [
        [local_search.finish(s, c, n, n) if np.isfinite(c) else np.inf for s, c in zip(given.shape, row, strict=True)]
        for n, row in _hardest(given)
    ]
    return Relaxation(max(found.seconds, max(min(row) for row in alone)), found.shares)


def _hardest(given: Problem) -> list[tuple[float, Floats]]:
    """Return the longest sequence of every set of kinds that fit it: no other can take longer alone."""
    fits = np.isfinite(given.cost).sum(1)
    first = np.flatnonzero(np.diff(fits, prepend=-1))
    return [(float(given.lengths[i]), given.cost[i]) for i in first]


def value(given: Problem, placed: Ints) -> float:
    """Return when the last pipeline finishes."""
    return max(ends(given, placed).tolist(), default=0.0)


def ends(given: Problem, placed: Ints) -> Floats:
    """Return when each pipeline finishes [P], 0 for one without work."""
    count, n = len(given.pipelines), len(placed)
    loads, tokens = np.zeros(count), np.zeros(count)
    first, second = np.zeros(count, np.int64), np.zeros(count, np.int64)
    local_search.state_of(placed, given.cost, given.lengths, given.kind, loads, tokens, first, second)
    longest = np.append(given.lengths, 0.0)[np.minimum(first, n)]
    rows = zip(given.kind.tolist(), loads, tokens, longest, strict=True)
    return np.array([local_search.finish(given.shape[t], s, w, h) for t, s, w, h in rows])


def longest_first(given: Problem, cost: Floats | None = None, start: Ints | None = None) -> Ints:
    """Put each sequence, longest first, where it finishes first."""
    begin = np.zeros(len(given.pipelines), np.int64) if start is None else start
    placed = local_search.longest_first(
        given.cost if cost is None else cost, given.lengths, given.kind, given.shape, begin, False
    )
    return np.asarray(placed)


def search(given: Problem, relaxed: Relaxation, effort: Effort, seed: int) -> Ints:
    """Return the best spread found [n]."""
    nothing = np.zeros(len(given.pipelines))
    best, kept = np.inf, longest_first(given)
    starts = [placed for placed in _starts(given, relaxed, effort, seed) if (placed >= 0).all()]
    for placed in sorted(starts, key=lambda placed: value(given, placed))[:DESCENTS]:
        found = local_search.descend(placed, given.cost, given.lengths, given.kind, given.shape, nothing)
        if found < best:
            best, kept = found, placed
        if best <= relaxed.seconds * (1 + effort.enough):
            return kept
    return kicked(given, kept, nothing, relaxed, effort, seed)


def kicked(given: Problem, placed: Ints, extra: Floats, relaxed: Relaxation, effort: Effort, seed: int) -> Ints:
    """Return a spread improved by iterated local search."""
    found = placed.copy()
    kicks = -(-effort.kicks * 10 // max(10, len(given.pipelines)))
    enough = relaxed.seconds * (1 + effort.enough)
    local_search.kick(found, given.cost, given.lengths, given.kind, given.shape, extra, kicks, enough, seed)
    return found


def _starts(given: Problem, relaxed: Relaxation, effort: Effort, seed: int) -> list[Ints]:
    """Return the starting points: from the relaxation, longest first, Alg. 1, and with random caps."""
    rounded = longest_first(given, given.only(local_search.rounded(relaxed.shares)))
    found = [rounded, longest_first(given)]
    random = np.random.default_rng(seed)
    n, count = len(given.lengths), len(given.pipelines)
    trials, caps = -(-effort.trials * 10 // max(10, count)), -(-effort.caps * 10 // max(10, count))
    if trials:
        orders = np.argsort(random.random((trials, n)), axis=1)
        found.append(local_search.greedy(orders, given.cost, given.lengths, given.kind, given.shape, True)[1])
    if given.shape[:, local_search.BUBBLE].any():
        for _ in range(caps):
            capped = random.random(count) < random.random()
            start = np.where(capped, (n * random.random(count) ** 2).astype(np.int64), 0)
            start[given.kind == int(np.argmax([k.max_len for k in given.kinds]))] //= 2
            found.append(longest_first(given, start=start))
    return found

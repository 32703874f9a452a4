"""Search for the best spread of a mini-batch over pipelines, from several starts, against the proven bound.

The starts: the relaxation, rounded; longest first; Alg. 1; and longest first where random pipelines refuse long
sequences, so that these come to share few pipelines: each pays its bubble by its longest. Local search improves the
best few of them, and the best of these is kicked until it is near enough to the bound.

    n sequences, P pipelines, K kinds, `placed` [n]: as in `local_search`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hydragraph.planner import local_search
from hydragraph.planner.bound import Relaxation, relax
from hydragraph.planner.local_search import Floats, Instance, Ints
from hydragraph.planner.problem import Problem


@dataclass(frozen=True)
class Effort:
    """How long to search.

    Attributes:
        kicks: of the iterated local search, for up to 10 pipelines; fewer for more, as are the next two.
        trials: shuffles of Alg. 1; 0: leave it out.
        caps: starts in which pipelines refuse what is longer than a random length.
        enough: stop at this gap to the bound.
        rounds: of `assign`: how often to spread, each time with what packing the last spread added.
    """

    kicks: int = 50
    trials: int = 100
    caps: int = 24
    enough: float = 1e-3
    rounds: int = 3


# Of the best starts, local search improves so many: a worse start may well descend to a better end.
DESCENTS = 4
QUICK = Effort(kicks=0, trials=0, caps=0, rounds=1)


def bounded(problem: Problem, cost: Floats, room: Callable[[float], Floats], start: Ints) -> Relaxation:
    """Return the relaxation, and no less than what the hardest single sequence takes.

    Args:
        problem: the mini-batch.
        cost: [n, K] no more than what a sequence adds to a pipeline.
        room: how much of it a pipeline of each kind [K] can take by z.
        start: any spread; its end is where the bound is looked for below.
    """
    if not len(problem.lengths):
        return Relaxation(0.0, problem.cost)
    reached = value(problem, start)
    relaxed = relax(cost, lambda z: problem.counts * room(z), reached)
    # A sequence is on some pipeline, and ends there no earlier than if it were alone.
    alone = [
        [local_search.finish(t, c, n, n) if np.isfinite(c) else np.inf for t, c in zip(problem.terms, row, strict=True)]
        for n, row in _hardest(problem)
    ]
    return Relaxation(max(relaxed.seconds, max(min(row) for row in alone)), relaxed.shares)


def _hardest(problem: Problem) -> list[tuple[float, Floats]]:
    """Return the longest sequence of every set of kinds that fit it: no other can take longer alone."""
    fits = np.isfinite(problem.cost).sum(1)
    longest = np.flatnonzero(np.diff(fits, prepend=-1))
    return [(float(problem.lengths[i]), problem.cost[i]) for i in longest]


def value(problem: Problem, placed: Ints) -> float:
    """Return when the last pipeline finishes: Eq. 3, or what packing is expected to give (`Problem.terms`)."""
    return max(ends(problem, placed).tolist(), default=0.0)


def ends(problem: Problem, placed: Ints) -> Floats:
    """Return when each pipeline finishes [P], 0 for one without work."""
    return np.asarray(local_search.ends_of(placed, problem.instance))


def longest_first(problem: Problem, instance: Instance | None = None, start: Ints | None = None) -> Ints:
    """Put each sequence, longest first, where it finishes first.

    Args:
        problem: the mini-batch.
        instance: what to go by instead of its own arrays, such as those of `Problem.only`.
        start: pipeline p takes sequences from start[p] on only [P].
    """
    first = np.zeros(len(problem.pipelines), np.int64) if start is None else start
    return np.asarray(local_search.longest_first(problem.instance if instance is None else instance, first, False))


def search(problem: Problem, relaxed: Relaxation, effort: Effort, seed: int) -> Ints:
    """Return the best spread that was seen [n]."""
    nothing = np.zeros(len(problem.pipelines))
    best = np.inf
    best_placed = longest_first(problem)
    starts = [placed for placed in _starts(problem, relaxed, effort, seed) if (placed >= 0).all()]
    for placed in sorted(starts, key=lambda placed: value(problem, placed))[:DESCENTS]:
        end = local_search.descend(placed, problem.instance, nothing)
        if end < best:
            best = end
            best_placed = placed
        if best <= relaxed.seconds * (1 + effort.enough):
            return best_placed
    return kicked(problem, best_placed, nothing, relaxed, effort, seed)


def kicked(problem: Problem, placed: Ints, extra: Floats, relaxed: Relaxation, effort: Effort, seed: int) -> Ints:
    """Return a spread improved by iterated local search.

    Args:
        problem: the mini-batch.
        placed: the spread to improve.
        extra: seconds to add to each pipeline's end [P].
        relaxed: the bound, at which to stop.
        effort: how many kicks, and how near to the bound is enough.
        seed: of the kicks.
    """
    improved = placed.copy()
    # Rounded up, so that some effort never becomes none.
    kicks = -(-effort.kicks * 10 // max(10, len(problem.pipelines)))
    enough = relaxed.seconds * (1 + effort.enough)
    local_search.kick(improved, problem.instance, extra, kicks, enough, seed)
    return improved


def _starts(problem: Problem, relaxed: Relaxation, effort: Effort, seed: int) -> list[Ints]:
    """Return the starting points: from the relaxation, longest first, Alg. 1, and with random caps."""
    # The rounded relaxation decides the kinds, longest first the pipelines within them.
    starts = [
        longest_first(problem, problem.only(local_search.rounded(relaxed.shares))),
        longest_first(problem),
    ]
    random = np.random.default_rng(seed)
    n = len(problem.lengths)
    pipelines = len(problem.pipelines)
    # A descent takes longer with more pipelines: fewer trials and caps keep the whole about as long.
    trials = -(-effort.trials * 10 // max(10, pipelines))
    caps = -(-effort.caps * 10 // max(10, pipelines))
    if trials:
        orders = np.argsort(random.random((trials, n)), axis=1)
        starts.append(local_search.greedy(orders, problem.instance, True)[1])
    if problem.terms[:, local_search.BUBBLE].any():
        for _ in range(caps):
            # Some pipelines, few or many, refuse the longest sequences; by the square, most of them refuse only a few.
            capped = random.random(pipelines) < random.random()
            start = np.where(capped, (n * random.random(pipelines) ** 2).astype(np.int64), 0)
            # Those that take the longest sequences at all refuse half as many: somebody has to take them.
            start[problem.kind_of == int(np.argmax([k.max_len for k in problem.kinds]))] //= 2
            starts.append(longest_first(problem, start=start))
    return starts

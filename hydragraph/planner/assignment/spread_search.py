"""Search for the best assignment of a mini-batch to pipelines.

The search starts from the rounded linear relaxation, longest-first assignment, the result of Hydraulis's Alg. 1, and
longest-first assignments in which random pipelines refuse long sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.bounds import Relaxation, relax
from hydragraph.planner.assignment.local_search import AssignmentArrays, Floats, Ints
from hydragraph.planner.assignment.problem import AssignmentProblem

MANY = 1024


@dataclass(frozen=True)
class SearchEffort:
    """Search effort. More effort never gives a worse result.

    Attributes:
        kicks: number of random moves for up to 10 pipelines and `MANY` sequences; larger problems get fewer.
        enough: the search ends at this relative distance from the bound.
    """

    kicks: int = 50
    enough: float = 1e-3

    def kicks_for(self, pipelines: int, sequences: int) -> int:
        return -(-self.kicks * 10 * MANY // (max(10, pipelines) * max(MANY, sequences)))


# For up to 10 pipelines: numbers of shuffles for Alg. 1, and of starts in which pipelines refuse sequences.
TRIALS = 100
CAPS = 24
DESCENTS = 4


def bounded(problem: AssignmentProblem, cost: Floats, room: Callable[[float], Floats], start: Ints) -> Relaxation:
    """Solve the linear relaxation, and raise its bound to at least the slowest sequence's time alone.

    Args:
        cost: lower bound on each sequence's seconds [n, K].
        room: maps a time z to the seconds of work that a pipeline of each kind finishes by z [K].
    """
    if not len(problem.lengths):
        return Relaxation(0.0, problem.cost, np.ones(len(problem.kinds)))
    reached = value(problem, start)
    relaxed = relax(cost, lambda z: problem.counts * room(z), reached)
    alone = [
        min(local_search.finish(problem.terms[t], float(problem.kinds[t].work(n)), n, n) for t in kinds)
        for n, kinds in problem.hardest
    ]
    return Relaxation(max(relaxed.seconds, *alone), relaxed.shares, relaxed.prices)


def value(problem: AssignmentProblem, placed: Ints) -> float:
    return max(ends(problem, placed).tolist(), default=0.0)


def ends(problem: AssignmentProblem, placed: Ints) -> Floats:
    return np.asarray(local_search.ends_of(placed, problem.instance))


def longest_first(
    problem: AssignmentProblem, instance: AssignmentArrays | None = None, start: Ints | None = None
) -> Ints:
    first = np.zeros(len(problem.pipelines), np.int64) if start is None else start
    return np.asarray(local_search.longest_first(problem.instance if instance is None else instance, first, False))


def search(
    problem: AssignmentProblem,
    relaxed: Relaxation,
    effort: SearchEffort,
    seed: int,
    *,
    first: Ints | None = None,
    widely: bool = True,
) -> Ints:
    """Return the best assignment found: each sequence's pipeline [n].

    Args:
        widely: also start from Alg. 1 and from pipelines that refuse long sequences.
    """
    nothing = np.zeros(len(problem.pipelines))
    best = np.inf
    best_placed = longest_first(problem) if first is None else first
    starts = [placed for placed in _starts(problem, relaxed, best_placed, widely, seed) if (placed >= 0).all()]
    for placed in sorted(starts, key=lambda placed: value(problem, placed))[:DESCENTS]:
        end = local_search.descend(placed, problem.instance, nothing)
        if end < best:
            best = end
            best_placed = placed
        if best <= relaxed.seconds * (1 + effort.enough):
            return best_placed
    return kicked(problem, best_placed, nothing, relaxed, effort, seed)


def kicked(
    problem: AssignmentProblem, placed: Ints, extra: Floats, relaxed: Relaxation, effort: SearchEffort, seed: int
) -> Ints:
    improved = placed.copy()
    kicks = effort.kicks_for(len(problem.pipelines), len(problem.lengths))
    enough = relaxed.seconds * (1 + effort.enough)
    local_search.kick(improved, problem.instance, extra, kicks, enough, seed)
    return improved


def _starts(problem: AssignmentProblem, relaxed: Relaxation, first: Ints, widely: bool, seed: int) -> list[Ints]:
    starts = [longest_first(problem, problem.only(local_search.rounded(relaxed.shares))), first.copy()]
    if not widely:
        return starts
    random = np.random.default_rng(seed)
    n = len(problem.lengths)
    pipelines = len(problem.pipelines)
    trials = -(-TRIALS * 10 // max(10, pipelines))
    caps = -(-CAPS * 10 // max(10, pipelines))
    orders = np.argsort(random.random((trials, n)), axis=1)
    starts.append(local_search.greedy(orders, problem.instance)[1])
    if problem.terms[:, local_search.BUBBLE].any():
        for _ in range(caps):
            capped = random.random(pipelines) < random.random()
            start = np.where(capped, (n * random.random(pipelines) ** 2).astype(np.int64), 0)
            start[problem.kind_of == int(np.argmax([k.max_len for k in problem.kinds]))] //= 2
            starts.append(longest_first(problem, start=start))
    return starts

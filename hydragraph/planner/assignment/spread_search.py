"""Local search for the best assignment of a mini-batch to pipelines, from several assignments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.bounds import Relaxation, relax
from hydragraph.planner.assignment.local_search import Floats, Ints
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


def bounded(problem: AssignmentProblem, cost: Floats, room: Callable[[float], Floats], start: Ints) -> Relaxation:
    """Solve the linear relaxation; the bound is at least the slowest sequence's time alone.

    Args:
        cost: lower bound on each sequence's seconds [n, K].
        room: seconds of work that a pipeline of each kind finishes by a time z [K].
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


def longest_first(problem: AssignmentProblem) -> Ints:
    start = np.zeros(len(problem.pipelines), np.int64)
    return np.asarray(local_search.longest_first(problem.instance, start, False))


def rounded(problem: AssignmentProblem, relaxed: Relaxation) -> Ints:
    """Return the longest-first assignment to the rounded relaxation's kinds of pipelines (-1: none)."""
    allowed = local_search.rounded(relaxed.shares)
    return longest_first(replace(problem, cost=np.where(allowed, problem.cost, np.inf)))


def search(
    problem: AssignmentProblem, relaxed: Relaxation, starts: Sequence[Ints], effort: SearchEffort, seed: int
) -> Ints:
    """Improve `starts` in place; return the best. At least one must assign every sequence."""
    nothing = np.zeros(len(problem.pipelines))
    best = np.inf
    fitting = [placed for placed in starts if (placed >= 0).all()]
    best_placed = fitting[0]
    for placed in sorted(fitting, key=lambda placed: value(problem, placed)):
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

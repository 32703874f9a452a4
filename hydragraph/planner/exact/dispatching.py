"""Dispatch of sequences to pipelines (Hydraulis, section 6.2).

Hydraulis's equations -> functions:

    Eq. 2, minimum time of a pipeline            `local_search.finish` in mode EQ3
    Eq. 3, the last pipeline's end time          `Dispatch.seconds`; minimized by `integer_programs.exact_dispatch`
    Alg. 1                                       `greedy`
    a lower bound on Eq. 3 (ours)                `spread_search.bounded`, called with `eq3_room(problem)`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.local_search import Floats, Ints
from hydragraph.planner.assignment.problem import AssignmentProblem, Bubble, problem_of
from hydragraph.planner.assignment.spread_search import SearchEffort, bounded, longest_first, search, value

Method = Literal["search", "greedy", "longest first", "exact"]


@dataclass(frozen=True)
class Dispatch:
    """Assignment of sequences to pipelines, without micro-batches.

    Attributes:
        seconds: value of Eq. 3.
    """

    pipelines: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1 if self.bound else 0.0


def dispatch(
    schemes: Sequence[Scheme],
    profile: Profile,
    lengths: Sequence[int],
    *,
    bubble: Bubble = "longest",
    method: Method = "search",
    effort: SearchEffort | None = None,
    seed: int = 0,
) -> Dispatch:
    """Dispatch sequences to pipelines, minimizing the last pipeline's end time.

    Args:
        lengths: tokens of each sequence; empty sequences are skipped.
        bubble: "longest" is (PP - 1) T(longest assigned sequence), as in Eq. 2; "constant" is (PP - 1) T(MaxLen).
        method: "greedy" is Alg. 1; "exact" solves Eq. 3 through cvxpy (slow).

    Raises:
        Unsupported: a sequence is longer than every MaxLen, or a scheme is not in the profile.
    """
    problem = problem_of(profile.pipelines(schemes), lengths, bubble=bubble)
    placed = longest_first(problem)
    relaxed = bounded(problem, problem.cost, eq3_room(problem), placed)
    if method == "exact":
        from hydragraph.planner.exact.integer_programs import exact_dispatch

        placed = exact_dispatch(problem)
    elif method == "greedy":
        placed = greedy(problem, 100, seed)
    elif method != "longest first":
        placed = search(problem, relaxed, effort or SearchEffort(), seed)
    return Dispatch(problem.shares(placed), value(problem, placed), relaxed.seconds)


def greedy(problem: AssignmentProblem, trials: int, seed: int) -> Ints:
    orders = np.argsort(np.random.default_rng(seed).random((trials, len(problem.lengths))), axis=1)
    return np.asarray(local_search.greedy(orders, problem.instance)[1])


def eq3_room(problem: AssignmentProblem) -> Callable[[float], Floats]:
    """Return a function that maps a time z to the most work that each kind of pipeline finishes by z."""
    shortest = problem.lengths[-1] if len(problem.lengths) else 0.0
    kinds: tuple[PipelineCost, ...] = problem.kinds
    bubble = np.array([k.micro_batch_seconds([shortest]) for k in kinds]) * problem.terms[:, local_search.BUBBLE]
    least = problem.terms[:, local_search.FIXED] + bubble
    return lambda z: np.asarray(np.maximum(z - least, 0.0))

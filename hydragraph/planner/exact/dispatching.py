"""Give every sequence to a pipeline (Hydraulis, section 6.2).

Equations of Hydraulis -> functions:

    Eq. 2, what a pipeline takes at least        `local_search.finish` in mode EQ3, of `problem.problem_of`
    Eq. 3, the largest over pipelines            `Dispatch.seconds`; `exact.exact_dispatch` solves it as published
    Alg. 1                                       `greedy`
    a lower bound on Eq. 3 (the paper has none)  `dispatch_search.bounded`, with the room of `eq3_room`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.local_search import Floats, Ints
from hydragraph.planner.assignment.problem import Bubble, Problem, problem_of
from hydragraph.planner.assignment.spread_search import Effort, bounded, longest_first, search, value

Method = Literal["search", "greedy", "longest first", "exact"]


@dataclass(frozen=True)
class Dispatch:
    """Which pipeline gets which sequences.

    Attributes:
        pipelines: the caller's sequences of each pipeline, longest first.
        seconds: Eq. 3: the largest of sum (a l^2 + b l) + c + (PP - 1) T(longest).
        bound: no dispatch has less.
    """

    pipelines: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """How far above the bound, as a part of it."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def dispatch(
    schemes: Sequence[Scheme],
    profile: Profile,
    lengths: Sequence[int],
    *,
    bubble: Bubble = "longest",
    method: Method = "search",
    effort: Effort | None = None,
    seed: int = 0,
) -> Dispatch:
    """Dispatch sequences to pipelines so that the last one finishes early.

    Args:
        schemes: one per pipeline; their devices are all there are.
        lengths: tokens per sequence; those of length 0 are left out.
        profile: what each scheme costs.
        bubble: (PP - 1) times the longest assigned sequence (Eq. 2), or times MaxLen, a constant of the pipeline.
        method: "greedy" is Alg. 1 (ties to the least loaded); "exact" solves Eq. 3 as an integer program through cvxpy
            (slow; small cases).
        effort: how long to search; default: `Effort()`.
        seed: of the search.

    Raises:
        Unsupported: a sequence is longer than every MaxLen, or the profile lacks a scheme.
    """
    problem = problem_of(profile.pipelines(schemes), lengths, bubble=bubble)
    placed = longest_first(problem)
    relaxed = bounded(problem, problem.cost, eq3_room(problem), placed)
    # cvxpy is an extra, and slow to import: only who asks for the oracle needs it.
    if method == "exact":
        from hydragraph.planner.exact.exact_assignment import exact_dispatch

        placed = exact_dispatch(problem)
    elif method == "greedy":
        placed = greedy(problem, 100, seed)
    elif method != "longest first":
        placed = search(problem, relaxed, effort or Effort(), seed)
    return Dispatch(problem.shares(placed), value(problem, placed), relaxed.seconds)


def greedy(problem: Problem, trials: int, seed: int) -> Ints:
    """Return what Alg. 1 leads to [n], for so many shuffled orders."""
    # All trials draw from one generator: the same seed gives the same trials, and more trials begin with the same ones.
    orders = np.argsort(np.random.default_rng(seed).random((trials, len(problem.lengths))), axis=1)
    return np.asarray(local_search.greedy(orders, problem.instance, True)[1])


def eq3_room(problem: Problem) -> Callable[[float], Floats]:
    """Return how much work a pipeline of each kind can do by z: what its least bubble leaves."""
    # A pipeline in use has at least the shortest sequence, and with it the least bubble.
    shortest = problem.lengths[-1] if len(problem.lengths) else 0.0
    kinds: tuple[PipelineCost, ...] = problem.kinds
    bubble = np.array([k.micro_batch_seconds([shortest]) for k in kinds]) * problem.terms[:, local_search.BUBBLE]
    least = problem.terms[:, local_search.FIXED] + bubble
    return lambda z: np.asarray(np.maximum(z - least, 0.0))

"""Give every sequence to a pipeline (Hydraulis, Eq. 3 and Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hydragraph.cost.profile import PipelineCost, Profile, Scheme
from hydragraph.planner import local_search
from hydragraph.planner.dispatch_search import Effort, bounded, longest_first, search, value
from hydragraph.planner.local_search import Floats, Ints
from hydragraph.planner.problem import Bubble, Problem, problem

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
        bubble: (PP - 1) times the longest assigned sequence (Eq. 3), or times MaxLen, a constant of the pipeline.
        method: "greedy" is Alg. 1 (ties to the least loaded); "exact" solves Eq. 3 as an integer program through cvxpy
            (slow; small cases).

    Raises:
        Unsupported: a sequence is longer than every MaxLen, or the profile lacks a scheme.
    """
    given = problem(profile.pipelines(schemes), lengths, bubble=bubble)
    first = longest_first(given)
    relaxed = bounded(given, given.cost, eq3_room(given), first)
    if method == "exact":
        from hydragraph.planner.exact import exact_dispatch

        placed = exact_dispatch(given)
    elif method == "greedy":
        placed = greedy(given, 100, seed)
    else:
        placed = first if method == "longest first" else search(given, relaxed, effort or Effort(), seed)
    return Dispatch(given.shares(placed), value(given, placed), relaxed.seconds)


def greedy(given: Problem, trials: int, seed: int) -> Ints:
    """Return what Alg. 1 finds."""
    orders = np.argsort(np.random.default_rng(seed).random((trials, len(given.lengths))), axis=1)
    return np.asarray(local_search.greedy(orders, given.cost, given.lengths, given.kind, given.shape, True)[1])


def eq3_room(given: Problem) -> Callable[[float], Floats]:
    """Return how much work a pipeline of each kind can do by z: what its least bubble leaves."""
    shortest = given.lengths[-1] if len(given.lengths) else 0.0
    kinds: tuple[PipelineCost, ...] = given.kinds
    bubble = np.array([k.micro_batch_seconds([shortest]) for k in kinds]) * given.shape[:, local_search.BUBBLE]
    least = given.shape[:, local_search.FIXED] + bubble
    return lambda z: np.asarray(np.maximum(z - least, 0.0))

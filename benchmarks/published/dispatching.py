"""Dispatch of sequences to pipelines, without micro-batches (Hydraulis, section 6.2).

Hydraulis's equations -> functions:

    Eq. 2, minimum time of a pipeline            `local_search.finish` in mode EQ3
    Eq. 3, the last pipeline's end time          `Dispatch.seconds`; minimized by `integer_programs.exact_dispatch`
    Alg. 1                                       `greedy`
    a lower bound on Eq. 3 (ours)                `spread_search.bounded`, called with `eq3_room(problem)`

`widely` starts from what the planner starts from, the result of Alg. 1, and longest-first assignments in which random
pipelines refuse long sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.bounds import Relaxation
from hydragraph.planner.assignment.local_search import AssignmentArrays, Floats, Ints, finish
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of
from hydragraph.planner.assignment.spread_search import SearchEffort, bounded, longest_first, rounded, search, value

Method = Literal["search", "greedy", "longest first", "exact"]
Bubble = Literal["longest", "constant"]

# For up to 10 pipelines: numbers of shuffles for Alg. 1, and of starts in which pipelines refuse sequences.
TRIALS = 100
CAPS = 24
DESCENTS = 4


@dataclass(frozen=True)
class Dispatch:
    """Assignment of sequences to pipelines, without micro-batches.

    Attributes:
        seconds: value of Eq. 3.
        bound: lower bound on `seconds`.
    """

    pipelines: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative distance of `seconds` from `bound`."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def dispatch(
    schemes: Sequence[Scheme],
    profile: Profile,
    lengths: Sequence[int],
    *,
    bubble: Bubble = "longest",
    method: Method = "search",
) -> Dispatch:
    """Dispatch sequences to pipelines, minimizing the last pipeline's end time.

    Args:
        schemes: one for each pipeline.
        profile: constants of the schemes.
        lengths: tokens of each sequence; empty sequences are skipped.
        bubble: as in `eq3_problem`.
        method: "greedy" is Alg. 1; "exact" solves Eq. 3 through cvxpy (slow).

    Raises:
        Unsupported: a sequence is longer than every MaxLen, or a scheme is not in the profile.
    """
    problem = eq3_problem(profile.pipelines(schemes), lengths, bubble)
    placed = longest_first(problem)
    relaxed = bounded(problem, problem.cost, eq3_room(problem), placed)
    if method == "exact":
        from hydragraph.planner.exact.integer_programs import exact_dispatch

        placed = exact_dispatch(problem)
    elif method == "greedy":
        placed = greedy(problem, 100, 0)
    elif method != "longest first":
        placed = widely(problem, relaxed, SearchEffort(), 0)
    return Dispatch(problem.shares(placed), value(problem, placed), relaxed.seconds)


def eq3_problem(pipelines: Sequence[PipelineCost], lengths: Sequence[int], bubble: Bubble) -> AssignmentProblem:
    """Return the problem whose pipelines end by Eq. 2.

    Args:
        pipelines: costs of each pipeline.
        lengths: tokens of each sequence.
        bubble: "longest" is (PP - 1) T(longest assigned sequence), as in Eq. 2; "constant" is (PP - 1) T(MaxLen).
    """
    problem = problem_of(pipelines, lengths)
    if bubble == "longest":
        return problem
    terms = problem.terms.copy()
    full = np.array([kind.micro_batch_seconds([kind.max_len]) for kind in problem.kinds])
    terms[:, local_search.FIXED] += terms[:, local_search.BUBBLE] * full
    terms[:, local_search.BUBBLE] = 0.0
    return replace(problem, terms=terms)


def eq3_room(problem: AssignmentProblem) -> Callable[[float], Floats]:
    """Return a function that maps a time z to the most work that each kind of pipeline finishes by z."""
    shortest = problem.lengths[-1] if len(problem.lengths) else 0.0
    bubble = np.array([k.micro_batch_seconds([shortest]) for k in problem.kinds])
    least = problem.terms[:, local_search.FIXED] + bubble * problem.terms[:, local_search.BUBBLE]
    return lambda z: np.asarray(np.maximum(z - least, 0.0))


def widely(problem: AssignmentProblem, relaxed: Relaxation, effort: SearchEffort, seed: int) -> Ints:
    """Return the best assignment that a search from many starts finds: each sequence's pipeline [n]."""
    starts = [rounded(problem, relaxed), longest_first(problem), *_further(problem, seed)]
    fitting = [placed for placed in starts if (placed >= 0).all()]
    best = sorted(fitting, key=lambda placed: value(problem, placed))[:DESCENTS]
    return search(problem, relaxed, best, effort, seed)


def _further(problem: AssignmentProblem, seed: int) -> list[Ints]:
    random = np.random.default_rng(seed)
    n = len(problem.lengths)
    pipelines = len(problem.pipelines)
    orders = np.argsort(random.random((-(-TRIALS * 10 // max(10, pipelines)), n)), axis=1)
    starts = [np.asarray(compiled_greedy(orders, problem.instance)[1])]
    if not problem.terms[:, local_search.BUBBLE].any():
        return starts
    longest = int(np.argmax([kind.max_len for kind in problem.kinds]))
    for _ in range(-(-CAPS * 10 // max(10, pipelines))):
        capped = random.random(pipelines) < random.random()
        start = np.where(capped, (n * random.random(pipelines) ** 2).astype(np.int64), 0)
        start[problem.kind_of == longest] //= 2
        starts.append(np.asarray(local_search.longest_first(problem.instance, start, False)))
    return starts


def greedy(problem: AssignmentProblem, trials: int, seed: int) -> Ints:
    """Return the best of `trials` runs of Alg. 1 in random orders."""
    orders = np.argsort(np.random.default_rng(seed).random((trials, len(problem.lengths))), axis=1)
    return np.asarray(compiled_greedy(orders, problem.instance)[1])


@compiled
def compiled_greedy(orders: Ints, instance: AssignmentArrays) -> tuple[float, Ints]:
    """Run Alg. 1 in several orders: assign each sequence to the pipeline where it least delays the latest end time.

    Args:
        orders: order of the sequences in each trial [trials, n].

    Returns:
        For the best order: the latest end time, and each sequence's pipeline.
    """
    cost = instance.cost
    lengths = instance.lengths
    kind_of = instance.kind_of
    n = len(lengths)
    pipelines = len(kind_of)
    best_last = np.inf
    best_placed = np.full(n, -1, np.int64)
    for trial in range(len(orders)):
        loads = np.zeros(pipelines)
        tokens = np.zeros(pipelines)
        longest = np.zeros(pipelines)  # in tokens
        placed = np.full(n, -1, np.int64)
        last = 0.0  # O_max of Alg. 1
        for i in orders[trial]:
            least = np.inf
            tie = np.inf
            chosen = -1
            for p in range(pipelines):
                t = kind_of[p]
                if cost[i, t] == np.inf:
                    continue
                end = finish(
                    instance.terms[t], loads[p] + cost[i, t], tokens[p] + lengths[i], max(longest[p], lengths[i])
                )
                grown = max(last, end)
                if grown < least or (grown == least and end < tie):
                    least = grown
                    tie = end
                    chosen = p
            if chosen >= 0:
                placed[i] = chosen
                last = least
                loads[chosen] += cost[i, kind_of[chosen]]
                tokens[chosen] += lengths[i]
                longest[chosen] = max(longest[chosen], lengths[i])
        if last < best_last:
            best_last = last
            best_placed = placed
    return best_last, best_placed

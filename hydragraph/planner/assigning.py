"""Assign a mini-batch: sequences to pipelines, and there to micro-batches, as one search.

Dispatching and packing depend on each other: a pipeline's end is known only once its share is cut into micro-batches.
So sequences are dispatched by what the best number of equal micro-batches would take (`local_search.finish`, FORMED);
then each share is packed, and what packing took beyond that is added to the pipeline's end when dispatching again.

    z        a time by which every pipeline is to have finished
    room(z)  [K]  seconds of work that a pipeline of each kind can do by z, whatever its number V of micro-batches

Example: PP = 4 and c = 1. By z = 25, one micro-batch holds 25 / 4 - 1 = 5.25 of work. With several,
sqrt(work) = sqrt(25) - sqrt(3) = 3.27: V = sqrt(3 work / c) = 5.66 of them hold 10.68. No pipeline does more.

Equations of Hydraulis -> functions:

    section 6, dispatch, then pack                                      `assign_pipelines`
    Appendix D.1, sum_j cost_j + (PP - 1) max_j cost_j of each pipeline  `PlannedAssignment.estimates`
    a lower bound on it for any V (ours; the paper has none)             `formed_room`, `bound_devices`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hydragraph.cost.profile import PipelineCost, Profile, Scheme
from hydragraph.planner.dispatch_search import QUICK, Effort, bounded, ends, kicked, longest_first, search
from hydragraph.planner.local_search import Floats, Ints, finish
from hydragraph.planner.packing import Packing, pack_sorted
from hydragraph.planner.problem import Problem, problem_of
from hydragraph.spec.assignment import Assignment

# Kicks of each packing inside a round, and of the dispatch between them; `pack` and `dispatch` alone search longer.
PACKING_KICKS = 20
EFFORT = Effort(kicks=20, trials=0, caps=0, enough=3e-3)


@dataclass(frozen=True)
class PlannedAssignment(Assignment):
    """An assignment and what it is expected to take.

    Attributes:
        seconds: the largest over pipelines of the sum of its micro-batches + (PP - 1) times the largest one.
        seconds_1f1b: the largest over pipelines of the 1F1B recurrence.
        bound: no assignment has fewer `seconds`.
        estimates, by_pipeline: `seconds` and `seconds_1f1b` of each pipeline, 0 for one without work.
    """

    seconds: float = 0.0
    seconds_1f1b: float = 0.0
    bound: float = 0.0
    estimates: tuple[float, ...] = ()
    by_pipeline: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """How far `seconds` are above the bound, as a part of it."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    @property
    def spread(self) -> float:
        """How much longer the slowest pipeline takes than the fastest one that works, as a part of the fastest."""
        busy = [s for s in self.by_pipeline if s]
        return max(busy) / min(busy) - 1 if busy else 0.0


def assign(
    schemes: Sequence[Scheme],
    profile: Profile,
    lengths: Sequence[int],
    deadline_s: float | None = None,
    *,
    effort: Effort | None = None,
    seed: int = 0,
) -> PlannedAssignment:
    """Assign every sequence to a pipeline and a micro-batch, so that the last pipeline finishes early.

    Args:
        schemes: one per pipeline; their devices are all there are.
        profile: what each scheme costs.
        lengths: tokens per sequence; those of length 0 are left out.
        deadline_s: seconds after which no further improvement is begun; 0: only the quick plan. None: the search is
            bounded by its effort alone, so the same arguments give the same assignment.
        effort: how long to search; default: `EFFORT`, or the quick plan where the deadline is 0.
        seed: of the search.

    Raises:
        Unsupported: a sequence is longer than every MaxLen, or the profile lacks a scheme.
    """
    return assign_pipelines(profile.pipelines(schemes), lengths, deadline_s, effort=effort, seed=seed)


def assign_pipelines(
    pipelines: Sequence[PipelineCost],
    lengths: Sequence[int],
    deadline_s: float | None = None,
    *,
    effort: Effort | None = None,
    seed: int = 0,
) -> PlannedAssignment:
    """Assign for any pipelines; see `assign`."""
    # A deadline bounds when work is begun, not when it ends: no round is cut short, so every plan is a whole one.
    until = time.monotonic() + deadline_s if deadline_s is not None else None
    chosen = QUICK if deadline_s is not None and deadline_s <= 0 else effort or EFFORT
    problem = problem_of(pipelines, lengths, formed=True)
    if not len(problem.lengths):
        return _together([Packing((), 0.0, 0.0, 0.0) for _ in pipelines], 0.0, lengths)
    # Longest first is a plan already, whatever the deadline; the bound is looked for below it.
    placed = longest_first(problem)
    relaxed = bounded(problem, _least_cost(problem), formed_room(problem), placed)
    if not _late(until):
        placed = search(problem, relaxed, chosen, seed)
    best = last = formed(problem, placed, relaxed.seconds, lengths)
    for round_ in range(1, chosen.rounds):
        if _late(until) or best.gap <= chosen.enough:
            break
        # What packing took beyond the ends that the search went by is what it did not know.
        learned = np.array(last.estimates) - ends(problem, placed)
        placed = kicked(problem, placed, learned, relaxed, chosen, seed + round_)
        last = formed(problem, placed, relaxed.seconds, lengths)
        best = min(best, last, key=lambda a: a.seconds)
    return best


def bound_pipelines(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> float:
    """Return seconds that no assignment to these pipelines can beat."""
    problem = problem_of(pipelines, lengths, formed=True)
    # Any spread will do to start from: all on the pipeline that takes the longest sequences is one that always fits.
    somewhere = np.full(len(problem.lengths), int(np.argmax([p.max_len for p in pipelines])), dtype=np.int64)
    return bounded(problem, _least_cost(problem), formed_room(problem), somewhere).seconds


def bound_devices(kinds: Sequence[PipelineCost], lengths: Sequence[int], devices: int) -> float:
    """Return seconds that no assignment to any pipelines of these kinds, of so many devices in all, can beat.

    By z, a pipeline of kind k can do room_k(z) work. So a sequence takes at least cost[i, k] / room_k(z) of one, and as
    much of its devices; where these come to more than there are, with the best kind for each sequence, z is excluded.
    """
    problem = problem_of(kinds, lengths, formed=True)
    if not len(problem.lengths):
        return 0.0
    devices_of = np.array([k.devices for k in problem.kinds])
    cost = _least_cost(problem)
    room = formed_room(problem)
    alone = np.full_like(cost, np.inf)
    # Nobody is done before the sequence that takes longest alone, on the kind where it takes least.
    for i, t in np.argwhere(np.isfinite(cost)):
        alone[i, t] = finish(problem.terms[t], problem.cost[i, t], problem.lengths[i], problem.lengths[i])

    # Whether z can be kept grows with z, so bisection finds the least one that is not excluded.
    def enough(z: float) -> bool:
        usable = alone <= z
        needed = np.where(usable, cost, 0.0) * devices_of / np.maximum(room(z), 1e-300)
        return bool(np.where(usable, needed, np.inf).min(1).sum() <= devices)

    low = float(alone.min(1).max())
    if enough(low):
        return low
    high = 2 * low
    while not enough(high):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _late(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until


def formed(problem: Problem, placed: Ints, bound: float, sequences: Sequence[int]) -> PlannedAssignment:
    """Cut each pipeline's share into micro-batches."""
    # A share keeps the order by length, so packing need not sort again.
    packings = []
    for p, (pipeline, t) in enumerate(zip(problem.pipelines, problem.kind_of.tolist(), strict=True)):
        mine = np.flatnonzero(placed == p)
        work = problem.cost[mine, t]
        lengths = problem.lengths[mine]
        packings.append(
            pack_sorted(pipeline, problem.order[mine], work, lengths, problem.terms[t], "sum", PACKING_KICKS)
            if len(mine)
            else Packing((), 0.0, 0.0, 0.0)
        )
    return _together(packings, bound, sequences)


def _together(packings: Sequence[Packing], bound: float, lengths: Sequence[int]) -> PlannedAssignment:
    by_pipeline = tuple(p.seconds_1f1b for p in packings)
    return PlannedAssignment(
        tuple(p.micro_batches for p in packings),
        tuple(map(int, lengths)),
        seconds=max(p.seconds for p in packings),
        seconds_1f1b=max(by_pipeline),
        bound=bound,
        estimates=tuple(p.seconds for p in packings),
        by_pipeline=by_pipeline,
    )


def _least_cost(problem: Problem) -> Floats:
    """Return [n, K] what a sequence adds at least: its work, and without a bubble its part of full micro-batches."""
    # Without a bubble, V is as small as MaxLen allows, so c is paid at least once per MaxLen tokens. With a bubble, a
    # larger V may pay, and `formed_room` weighs c against it.
    overhead = np.array([k.c / k.max_len if k.stages == 1 and k.max_len else 0.0 for k in problem.kinds])
    return np.asarray(problem.cost + problem.lengths[:, None] * overhead)


def formed_room(problem: Problem) -> Callable[[float], Floats]:
    """Return how much work a pipeline of each kind can do by z, with any number V >= 1 of micro-batches.

    By z, sum + c V + (PP - 1) (sum / V + c) <= z. The best V is sqrt((PP - 1) sum / c), which gives
    sqrt(sum) = sqrt(z) - sqrt((PP - 1) c); where that V is below 1, sum = z / PP - c.
    """
    # By z, sum + c V + (PP - 1) (sum / V + c): convex in V, so what the best V leaves bounds every other.
    depth = np.array([k.stages - 1.0 for k in problem.kinds])
    c = np.array([k.c for k in problem.kinds])

    def room(z: float) -> Floats:
        several = np.maximum(np.sqrt(z) - np.sqrt(depth * c), 0.0) ** 2
        single = np.maximum(z / (depth + 1) - c, 0.0)
        return np.asarray(np.where(depth == 0, z, np.where(depth * several >= c, several, single)))

    return room

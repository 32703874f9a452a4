"""Assignment of a mini-batch's sequences to pipelines and micro-batches.

Each round first assigns sequences to pipelines, assuming that every pipeline divides its sequences into the best number
of equal micro-batches (`local_search.finish`, FORMED). The round then packs each pipeline's sequences. The next round
corrects each pipeline's assumed end time by the error that packing revealed.

The rounds assume that all PP stages are as slow as the slowest, and that filling and draining a pipeline takes (PP - 1)
times as long as the pipeline's largest micro-batch. `schedule_search` improves the best result by simulating
the actual schedule.

Hydraulis's equations -> functions:

    section 6, dispatch, then pack                                       `enveloped`
    Appendix D.1, minimize sum_j cost_j + (PP - 1) max_j cost_j          `formed`
    a lower bound on this sum for any number V of micro-batches (ours)   `formed_room`
    improvement of the schedule's end time (ours)                        `improved`
    a lower bound on this end time (ours)                                `bounded_pipelines`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.stage_arrays import StageTerms, stage_terms
from hydragraph.planner.assignment.bounds import Relaxation, schedule_bound
from hydragraph.planner.assignment.local_search import Floats, Ints
from hydragraph.planner.assignment.micro_batches import SUM, form_in_order
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of
from hydragraph.planner.assignment.schedule_search import TASKS, Sequences, ends_of, improve
from hydragraph.planner.assignment.spread_search import (
    SearchEffort,
    bounded,
    ends,
    kicked,
    longest_first,
    rounded,
    search,
)
from hydragraph.spec.assignment import Assignment

ROUNDS = 3
SPREADING = SearchEffort(kicks=20, enough=3e-3)
PACKING_KICKS = 20
EFFORT = SearchEffort(kicks=50, enough=1e-3)


@dataclass(frozen=True)
class PlannedAssignment(Assignment):
    """An assignment and its expected time.

    Attributes:
        seconds: exact end time of the last pipeline.
        bound: lower bound on the time of any assignment.
    """

    seconds: float = 0.0
    bound: float = 0.0
    by_pipeline: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1 if self.bound else 0.0


def assign_pipelines(
    pipelines: Sequence[PipelineCost],
    lengths: Sequence[int],
    *,
    effort: SearchEffort | None = None,
    seed: int = 0,
) -> PlannedAssignment:
    return assign_bounded(bounded_pipelines(pipelines, lengths), lengths, effort=effort, seed=seed)


@dataclass(frozen=True, eq=False)
class BoundedMiniBatch:
    """A mini-batch, each sequence's pipeline in its longest-first assignment (`first` [n]), and lower bounds on the
    time of any assignment.
    """

    problem: AssignmentProblem
    given: Sequences
    first: Ints
    relaxed: Relaxation
    seconds: float


def bounded_pipelines(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> BoundedMiniBatch:
    problem = problem_of(pipelines, lengths, formed=True)
    max_len = np.array([float(kind.max_len) for kind in problem.kinds])
    sequences = Sequences(problem.lengths, problem.kind_of, max_len, stage_terms(problem.kinds, len(problem.lengths)))
    first = longest_first(problem)
    relaxed = bounded(problem, _least_cost(problem), formed_room(problem), first)
    return BoundedMiniBatch(
        problem,
        sequences,
        first,
        relaxed,
        schedule_bound(problem, line_terms(problem, sequences.terms), relaxed.prices),
    )


def line_terms(problem: AssignmentProblem, terms: StageTerms) -> StageTerms:
    """Return cost terms that give a lower bound on a stage's time."""
    if terms.faithful.all() or not len(problem.lengths):
        return terms
    return stage_terms(problem.kinds, len(problem.lengths), lower=True)


def assign_bounded(
    start: BoundedMiniBatch,
    lengths: Sequence[int],
    *,
    effort: SearchEffort | None = None,
    seed: int = 0,
) -> PlannedAssignment:
    problem = start.problem
    if not len(problem.lengths):
        nothing = (0.0,) * len(problem.pipelines)
        return PlannedAssignment(((),) * len(nothing), tuple(map(int, lengths)), by_pipeline=nothing)
    cut = improved(start, enveloped(start, seed), effort or EFFORT, seed)
    batches = _micro_batches(cut, problem.order)
    return PlannedAssignment(
        batches, tuple(map(int, lengths)), cut.seconds, min(start.seconds, cut.seconds), tuple(cut.ends.tolist())
    )


@dataclass(frozen=True, eq=False)
class MicroBatchCut:
    placed: Ints
    batch: Ints
    order: Ints
    count: Ints
    ends: Floats

    @property
    def seconds(self) -> float:
        return float(self.ends.max())


def enveloped(start: BoundedMiniBatch, seed: int = 0) -> MicroBatchCut:
    problem = start.problem
    relaxed = start.relaxed
    placed = search(problem, relaxed, [rounded(problem, relaxed), start.first.copy()], SPREADING, seed)
    last, estimates = formed(start, placed)
    best = last
    # `last.ends - ends(...)`: error of each pipeline's formula, revealed by packing. The next round
    # adds it to the formula.
    for round_ in range(1, ROUNDS):
        # Within `enough` of a lower bound, further rounds cannot gain more.
        close = (max(estimates), relaxed.seconds), (best.seconds, start.seconds)
        if any(reached <= bound * (1 + SPREADING.enough) for reached, bound in close):
            break
        placed = kicked(problem, placed, last.ends - ends(problem, placed), relaxed, SPREADING, seed + round_)
        last, estimates = formed(start, placed)
        best = min(best, last, key=lambda cut: cut.seconds)
    return best


def formed(start: BoundedMiniBatch, placed: Ints) -> tuple[MicroBatchCut, Floats]:
    """Divide each pipeline's sequences into micro-batches; also return each pipeline's time by Appendix D.1."""
    problem = start.problem
    n = len(problem.lengths)
    pipelines = len(problem.pipelines)
    batch = np.zeros(n, np.int64)
    count = np.zeros(pipelines, np.int64)
    estimates = np.zeros(pipelines)
    first = 0
    for p, t in enumerate(problem.kind_of.tolist()):
        mine = np.flatnonzero(placed == p)
        if not len(mine):
            continue
        work = np.ascontiguousarray(problem.cost[mine, t])
        estimates[p], _, count[p], position = form_in_order(
            work, problem.lengths[mine], problem.terms[t], SUM, PACKING_KICKS
        )
        batch[mine] = first + position
        first += int(count[p])
    # Twice the largest count: room for new micro-batches in `schedule_search`.
    order = np.zeros((pipelines, min(n, 2 * int(count.max()) + 8)), np.int64)
    order[np.arange(order.shape[1]) < count[:, None]] = np.arange(first)
    return _cut(start, placed.copy(), batch, order, count), estimates


def improved(start: BoundedMiniBatch, cut: MicroBatchCut, effort: SearchEffort, seed: int) -> MicroBatchCut:
    """Improve an assignment by simulating the schedule; the result is never slower."""
    arrays = (cut.placed.copy(), cut.batch.copy(), cut.order.copy(), cut.count.copy())
    enough = start.seconds * (1 + effort.enough)
    improve(*arrays, start.given, effort.kicks_for(len(cut.count), len(cut.placed)), TASKS, enough, seed)
    # The search approximates the cost tables, so the exact ones decide.
    return min(cut, _cut(start, *arrays), key=lambda each: each.seconds)


def _cut(start: BoundedMiniBatch, placed: Ints, batch: Ints, order: Ints, count: Ints) -> MicroBatchCut:
    cut = MicroBatchCut(placed, batch, order, count, np.asarray(ends_of(placed, batch, order, count, start.given)))
    faithful = start.given.terms.faithful[start.problem.kind_of]
    # The arrays approximate links with measured points, so price exactly.
    if not faithful.all():
        sizes = _micro_batches(cut, start.problem.lengths.astype(np.int64))
        for p in np.flatnonzero(~faithful):
            cut.ends[p] = start.problem.pipelines[p].seconds(sizes[p])
    return cut


def _micro_batches(cut: MicroBatchCut, what: Ints) -> tuple[tuple[tuple[int, ...], ...], ...]:
    members: dict[int, list[int]] = {}
    for m, value in zip(cut.batch.tolist(), what.tolist(), strict=True):
        members.setdefault(m, []).append(value)
    return tuple(
        tuple(tuple(members[m]) for m in row[:count].tolist())
        for row, count in zip(cut.order, cut.count.tolist(), strict=True)
    )


def _least_cost(problem: AssignmentProblem) -> Floats:
    # In a single stage, every MaxLen tokens cost at least a micro-batch's c.
    overhead = np.array([k.c / k.max_len if k.stages == 1 and k.max_len else 0.0 for k in problem.kinds])
    return np.asarray(problem.cost + problem.lengths[:, None] * overhead)


def formed_room(problem: AssignmentProblem) -> Callable[[float], Floats]:
    """Return a function that maps a time z to the most work that each kind of pipeline finishes by z.

    Work `sum` in V >= 1 micro-batches of fixed cost c satisfies sum + c V + (PP - 1) (sum / V + c) <= z. The best V is
    sqrt((PP - 1) sum / c), so sqrt(sum) = sqrt(z) - sqrt((PP - 1) c). If this V is below 1, V = 1 gives sum = z / PP -
    c.
    """
    depth = np.array([k.stages - 1.0 for k in problem.kinds])
    c = np.array([k.c for k in problem.kinds])

    def room(z: float) -> Floats:
        several = np.maximum(np.sqrt(z) - np.sqrt(depth * c), 0.0) ** 2
        single = np.maximum(z / (depth + 1) - c, 0.0)
        return np.asarray(np.where(depth == 0, z, np.where(depth * several >= c, several, single)))

    return room

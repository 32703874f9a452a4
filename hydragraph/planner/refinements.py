"""Refinements of plans that the search found, with checked memory and simulated times.

memory budgets   stages that recompute save as many activations as fit, later stages first
schedules        another schedule that the run can use, such as zb-h1
interleaving     each device runs several stages, and owners are chosen again
sums in pieces   tensor-parallel sums overlap computation where this is faster
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.deadline import is_late
from hydragraph.planner.micro_batch_sizes import cut
from hydragraph.planner.price_candidate import NEAR_LIMIT, PricedPlan, held, needs, owners_by_block, simulated
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import BUDGETS
from hydragraph.spec.strategy import Strategy

BUDGETED = 2
# Maximum groups of stages; each gets one budget.
GROUPS = 4
# Plans to interleave, and the assumed least ratio of times with and without interleaving.
INTERLEAVED = 2
INTERLEAVED_LEAST = 0.93
# Stages per device, tried in turn while the time decreases.
VISITS = (2, 4)
# Least ratio of times without and with full recomputation, which repeats the forward.
LEAST = 3 / 4


def refined(
    costs: Costs,
    plans: Sequence[PricedPlan],
    schedules: Collection[str] = (),
    until: float | None = None,
    in_pieces: bool = True,
) -> list[PricedPlan]:
    """Return refined plans that fit and are faster than the originals."""
    if is_late(until):
        return []
    further_plans: list[PricedPlan] = []
    best = min((plan.seconds for plan in plans), default=math.inf)
    for plan in sorted(plans, key=lambda each: each.seconds)[:BUDGETED]:
        if LEAST * plan.seconds < best:
            strategy, memory = _largest(costs, plan, until)
            further_plans += _faster(costs, plan, strategy, memory)
    fastest = min([*plans, *further_plans], key=lambda each: each.seconds, default=None)
    if fastest is not None and any(len(pipeline.stages) > 1 for pipeline in fastest.strategy.pipelines):
        for schedule in schedules:
            strategy = replace(fastest.strategy, schedule=schedule)
            fits = _fitting(costs, fastest, strategy)
            further_plans += [] if fits is None else _faster(costs, fastest, strategy, fits)
    best = min((plan.seconds for plan in (*plans, *further_plans)), default=math.inf)
    nearly = [plan for plan in (*plans, *further_plans) if INTERLEAVED_LEAST * plan.seconds < best]
    for plan in sorted(nearly, key=lambda each: each.seconds)[:INTERLEAVED]:
        further_plans += _interleaved(costs, plan, best, until)
        best = min((faster.seconds for faster in further_plans), default=best)
    if fastest is not None and in_pieces and not is_late(until):
        fastest = min([fastest, *further_plans], key=lambda each: each.seconds)
        strategy = _summed_in_pieces(costs, fastest)
        fits = _fitting(costs, fastest, strategy)
        further_plans += [] if fits is None else _faster(costs, fastest, strategy, fits)
    return further_plans


def as_run(costs: Costs, plan: PricedPlan) -> PricedPlan:
    """Return the plan with a run's micro-batches and no idle pipelines, or unchanged if this does not fit."""
    try:
        assignment, _ = cut(costs.changed(home=plan.home), plan.strategy, plan.assignments[0].lengths)
    except Unsupported:
        return plan
    if (assignment,) == plan.assignments:
        return plan
    strategy = Strategy(tuple(compress(plan.strategy.pipelines, assignment.counts)), plan.strategy.schedule)
    assignment = Assignment(tuple(filter(None, assignment.micro_batches)), assignment.lengths)
    memory = held(costs, strategy, plan.home, (assignment,))
    if not _fits(costs, memory):
        return plan
    return simulated(costs, replace(plan, strategy=strategy, assignments=(assignment,), memory=memory))


def one_by_one(costs: Costs, plan: PricedPlan) -> PricedPlan:
    """Return the plan with one-sequence micro-batches, as in deterministic runs (infinitely slow if it cannot fit)."""
    if len({n for assignment in plan.assignments for n in assignment.lengths}) == 1 == len(plan.assignments):
        plan = as_run(costs, plan)
    owned = costs.changed(home=plan.home)
    assignments = tuple(assignment.one_by_one for assignment in plan.assignments)
    runs = [(assignment, math.isfinite(s)) for assignment, s in zip(assignments, plan.by_batch, strict=True)]
    memory = held(costs, plan.strategy, plan.home, [assignment for assignment, able in runs if able])
    fits = _fits(costs, memory)
    seconds = (owned.simulate(plan.strategy, a).seconds if able and fits else math.inf for a, able in runs)
    return replace(plan, assignments=assignments, by_batch=tuple(seconds), memory=memory, simulated=True)


def _summed_in_pieces(costs: Costs, plan: PricedPlan) -> Strategy:
    schedule = plan.strategy.schedule

    def seconds(stage: Stage, span: tuple[int, int], micro_batches: Sequence[Sequence[int]]) -> float:
        cost = costs.stage(stage, span).under(schedule)
        return math.fsum(math.fsum(cost.seconds(lengths)) for lengths in micro_batches)

    def chosen(stage: Stage, span: tuple[int, int], micro_batches: Sequence[Sequence[int]]) -> Stage:
        if stage.tp == 1 or stage.sequence_parallel:
            return stage
        options = (stage, replace(stage, sums_in_pieces=True))
        return min(options, key=lambda option: seconds(option, span, micro_batches))

    pipelines = (
        Pipeline(tuple(chosen(s, span, batches) for s, span in zip(p.stages, costs.spans(p), strict=True)))
        for p, batches in zip(plan.strategy.pipelines, plan.assignments[0].tokens, strict=True)
    )
    return replace(plan.strategy, pipelines=tuple(pipelines))


def _interleaved(costs: Costs, plan: PricedPlan, below: float, until: float | None) -> list[PricedPlan]:
    faster_plans: list[PricedPlan] = []
    for visits in VISITS:
        strategy = interleaved(plan.strategy, visits)
        if strategy is None or is_late(until) or _computing_s(costs, plan, strategy) >= below:
            break
        tried = _with_owners(costs, plan, strategy, below)
        fastest = min(tried, key=lambda each: each.seconds, default=None)
        if fastest is None or fastest.seconds >= below:
            break
        below = fastest.seconds
        faster_plans.append(fastest)
    return faster_plans


def _computing_s(costs: Costs, plan: PricedPlan, strategy: Strategy) -> float:
    ends = [costs.pipelines_end(strategy, assignment) for assignment in plan.assignments]
    return math.fsum(ends) / len(ends)


def interleaved(strategy: Strategy, visits: int) -> Strategy | None:
    """Return the strategy with `visits` similar stages per device, or None if impossible."""
    if strategy.shares or strategy.interleaved:
        return None
    pipelines = tuple(Pipeline(tuple(_turns(pipeline.stages, visits))) for pipeline in strategy.pipelines)
    changed = replace(strategy, pipelines=pipelines)
    return changed if changed.interleaved else None


def _turns(stages: Sequence[Stage], visits: int) -> list[Stage]:
    turns: list[Stage] = []
    for turn in range(visits):
        for i, stage in enumerate(stages):
            first, end = (
                -(-stage.layers * n // visits) if i == 0 else stage.layers * n // visits for n in (turn, turn + 1)
            )
            if turns and turns[-1].devices == stage.devices:
                turns[-1] = replace(turns[-1], layers=turns[-1].layers + end - first)
            elif end > first:
                turns.append(replace(stage, layers=end - first))
    return turns


def _with_owners(costs: Costs, plan: PricedPlan, strategy: Strategy, below: float) -> Iterator[PricedPlan]:

    # Before the memory check, which takes longer
    @cache
    def tried(home: Home) -> PricedPlan:
        return simulated(costs, replace(plan, strategy=strategy, home=home))

    memory = _fitting(costs, plan, strategy)
    if memory is not None and not plan.home.buckets:
        yield replace(tried(plan.home), memory=memory)
    if not strategy.streams:
        longest = max(plan.assignments, key=lambda assignment: sum(assignment.lengths))
        chosen = owners_by_block(costs, strategy, longest, lambda home: tried(home).seconds < below)
        if chosen is not None:
            home, memory = chosen
            if len(plan.assignments) > 1:
                memory = held(costs, strategy, home, plan.assignments)
            if _fits(costs, memory):
                yield replace(tried(home), memory=memory)


def _faster(costs: Costs, plan: PricedPlan, strategy: Strategy, memory: tuple[int, ...]) -> list[PricedPlan]:
    if strategy == plan.strategy:
        return []
    changed = simulated(costs, replace(plan, strategy=strategy, memory=memory))
    return [changed] if changed.seconds < plan.seconds else []


def _largest(costs: Costs, plan: PricedPlan, until: float | None) -> tuple[Strategy, tuple[int, ...]]:
    deepest = max(len(pipeline.stages) for pipeline in plan.strategy.pipelines)
    size = -(-deepest // GROUPS)
    strategy, memory = plan.strategy, plan.memory
    for first in range(0, deepest, size):
        for budget in BUDGETS:
            tried = _budgeted(strategy, range(first, first + size), budget)
            if tried == strategy or is_late(until):
                break
            fitting_memory = _fitting(costs, plan, tried)
            if fitting_memory is not None:
                strategy, memory = tried, fitting_memory
                break
    return strategy, memory


def _budgeted(strategy: Strategy, places: Collection[int], budget: float) -> Strategy:
    pipelines = []
    for pipeline in strategy.pipelines:
        stages = list(pipeline.stages)
        for i, stage in enumerate(stages):
            if stage.recompute is True and len(stages) - 1 - i in places:
                stages[i] = replace(stage, recompute=budget)
        pipelines.append(Pipeline(tuple(stages)))
    return replace(strategy, pipelines=tuple(pipelines))


def _fitting(costs: Costs, plan: PricedPlan, strategy: Strategy) -> tuple[int, ...] | None:
    changes = []
    for assignment in dict.fromkeys(plan.assignments):
        before, after = (needs(costs, compared, assignment) for compared in (plan.strategy, strategy))
        changes.append([now - then for then, now in zip(before, after, strict=True)])
    memory = tuple(size + round(max(change)) for size, *change in zip(plan.memory, *changes, strict=True))
    return memory if _fits(costs, memory) else None


def _fits(costs: Costs, memory: Sequence[int]) -> bool:
    return all(total <= NEAR_LIMIT * costs.memory_of(rank) for rank, total in enumerate(memory) if total)

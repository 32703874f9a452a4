"""Micro-batches of equal sequences that a run would form for each pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment.equal_sequences import by_formula, equally_long
from hydragraph.planner.price_candidate import form_of
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy

ANY = 2**62


def pipeline_costs(costs: Costs, strategy: Strategy, limit: int | None = None) -> tuple[PipelineCost, ...]:
    """Return each pipeline's cost with at most `limit` tokens per micro-batch (None: as many as fit)."""
    if strategy.shares:
        return costs.pipelines(strategy)
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    first = dict(zip(forms, strategy.pipelines, strict=True))
    cost_by_form = {form: costs.pipeline(pipeline, strategy.schedule, limit) for form, pipeline in first.items()}
    return tuple(cost_by_form[form] for form in forms)


def cut(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> tuple[Assignment, float]:
    """Return the assignment of equal sequences that a run would choose, and the last pipeline's end time."""
    return equally_long(pipeline_costs(costs, strategy), lengths)


def promised(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> Assignment:
    """Return a nearly optimal assignment, ignoring memory."""
    return by_formula(pipeline_costs(costs, strategy, ANY), lengths)

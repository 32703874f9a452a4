"""Assignment of a mini-batch to pipelines that are given by their schemes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines, bounded_pipelines


def assign(
    schemes: Sequence[Scheme],
    profile: Profile,
    lengths: Sequence[int],
    *,
    method: Literal["search", "exact"] = "search",
    seed: int = 0,
) -> PlannedAssignment:
    """Assign every sequence to a pipeline and a micro-batch, minimizing the last pipeline's end time.

    Args:
        lengths: tokens of each sequence; empty sequences are skipped.
        method: "exact" solves Hydraulis's integer programs, Eq. 3 and then Eq. 1, through cvxpy (slow).
    """
    pipelines = profile.pipelines(schemes)
    if method == "search":
        return assign_pipelines(pipelines, lengths, seed=seed)
    from hydragraph.planner.exact.integer_programs import exact_assignment

    assignment = exact_assignment(pipelines, lengths)
    by_pipeline = zip(pipelines, assignment.tokens, strict=True)
    ends = tuple(pipeline.seconds(batches) if batches else 0.0 for pipeline, batches in by_pipeline)
    bound = min(bounded_pipelines(pipelines, lengths).seconds, max(ends))
    return PlannedAssignment(assignment.micro_batches, assignment.lengths, max(ends), bound, ends)

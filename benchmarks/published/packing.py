"""Packing of one pipeline's sequences into micro-batches (Hydraulis, section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.planner.assignment.micro_batches import EQ1, form_in_order
from hydragraph.planner.assignment.problem import problem_of

KICKS = 60


@dataclass(frozen=True)
class Packing:
    """Micro-batches of one pipeline.

    Attributes:
        seconds: value of Eq. 1.
        bound: lower bound on `seconds`.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative distance of `seconds` from `bound`."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def pack(
    scheme: Scheme,
    profile: Profile,
    lengths: Sequence[int],
    *,
    devices: int | None = None,
    method: Literal["search", "exact"] = "search",
) -> Packing:
    """Pack sequences into micro-batches of at most MaxLen tokens.

    Args:
        scheme: degree and number of stages of the pipeline.
        profile: constants of the scheme.
        lengths: tokens of each sequence; empty sequences are skipped.
        devices: number of devices sharing the state; default: those of `scheme`.
        method: "exact" solves Eq. 1 through cvxpy (slow).
    """
    pipeline = profile.pipeline(scheme, devices or scheme[0] * scheme[1])
    if method == "exact":
        from hydragraph.planner.exact.integer_programs import exact_packing

        batches, seconds = exact_packing(pipeline, lengths)
        return Packing(batches, seconds, seconds)
    return pack_pipeline(pipeline, lengths)


def pack_pipeline(pipeline: PipelineCost, lengths: Sequence[int], kicks: int = KICKS) -> Packing:
    """Pack sequences into micro-batches of a pipeline by search.

    Args:
        pipeline: costs of the pipeline.
        lengths: tokens of each sequence.
        kicks: number of random moves.
    """
    problem = problem_of([pipeline], lengths, formed=True)
    if not len(problem.lengths):
        return Packing((), 0.0, 0.0)
    work = np.ascontiguousarray(problem.cost[:, 0])
    seconds, bound, count, placed = form_in_order(work, problem.lengths, problem.terms[0], EQ1, kicks)
    batches = (tuple(problem.order[placed == j].tolist()) for j in range(count))
    return Packing(tuple(batches), seconds, bound)

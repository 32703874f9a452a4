"""Choice of the strategy whose assignment of a mini-batch finishes first (Hydraulis, section 6).

Candidates are tried in ascending order of their lower bounds, until a bound exceeds the best time so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydragraph.cost.measured_profile import PipelineCost, Scheme
from hydragraph.cost.schemes import Schemes
from hydragraph.planner.assignment.assign_mini_batch import (
    BoundedMiniBatch,
    PlannedAssignment,
    assign_bounded,
    bounded_pipelines,
)
from hydragraph.planner.assignment.equal_sequences import equally_long
from hydragraph.planner.quick_plan import too_long


@dataclass(frozen=True)
class Verdict:
    """Result of one candidate strategy.

    Attributes:
        seconds: expected seconds, including `charge`; infinite if no assignment was computed.
        bound: lower bound on `seconds`; infinite if the longest sequence does not fit.
        charge: iteration time minus the slowest pipeline's time.
    """

    seconds: float
    bound: float
    charge: float


@dataclass(frozen=True)
class Choice:
    """The fastest candidate, and each candidate's verdict.

    Attributes:
        assignment: the winner's assignment; its `seconds` exclude `Verdict.charge`.
    """

    index: int
    assignment: PlannedAssignment
    verdicts: tuple[Verdict, ...]

    @property
    def seconds(self) -> float:
        return self.verdicts[self.index].seconds


def compare(
    candidates: Sequence[Sequence[Scheme]],
    profile: Schemes,
    lengths: Sequence[int],
    *,
    all_of_them: bool = False,
    seed: int = 0,
) -> Choice:
    """Choose a candidate, and report all candidates' times and bounds.

    Args:
        all_of_them: also evaluate candidates whose bound exceeds the best time so far.
    """
    pipelines = [profile.pipelines(candidate) for candidate in candidates]
    charges = [profile.charge(candidate) for candidate in candidates]
    return compare_pipelines(pipelines, lengths, charges, all_of_them=all_of_them, seed=seed)


def compare_pipelines(
    candidates: Sequence[Sequence[PipelineCost]],
    lengths: Sequence[int],
    charges: Sequence[float] | None = None,
    *,
    all_of_them: bool = False,
    seed: int = 0,
) -> Choice:
    """Choose among strategies, each given as the costs of its pipelines.

    Raises:
        Unsupported: the longest sequence fits no candidate.
    """
    if not candidates:
        raise ValueError("no candidates: give at least one strategy")
    paid = list(charges or [0.0] * len(candidates))
    longest = max(lengths, default=0)
    reach = [max(p.max_len for p in c) for c in candidates]
    fitting = [i for i, limit in enumerate(reach) if limit >= longest]
    if not fitting:
        raise too_long(list(lengths).index(longest), longest, max(reach))
    starts = {i: bounded_pipelines(candidates[i], lengths) for i in fitting}
    bounds = {i: start.seconds + paid[i] for i, start in starts.items()}
    verdicts = [Verdict(float("inf"), bounds.get(i, float("inf")), paid[i]) for i in range(len(candidates))]
    best = float("inf")
    winner = -1
    winning = PlannedAssignment(())
    for i in sorted(fitting, key=lambda i: (bounds[i], i)):
        if bounds[i] >= best and not all_of_them:
            break
        assignment = _assigned(candidates[i], starts[i], lengths, seed)
        seconds = assignment.seconds + paid[i]
        verdicts[i] = Verdict(seconds, bounds[i], paid[i])
        if (seconds, i) < (best, winner):
            best = seconds
            winner = i
            winning = assignment
    return Choice(winner, winning, tuple(verdicts))


def _assigned(
    pipelines: Sequence[PipelineCost], start: BoundedMiniBatch, lengths: Sequence[int], seed: int
) -> PlannedAssignment:
    if not 0 < min(lengths, default=0) == max(lengths, default=0):
        return assign_bounded(start, lengths, seed=seed)
    equal, seconds = equally_long(pipelines, lengths)
    ends = tuple(p.seconds(batches) for p, batches in zip(pipelines, equal.tokens, strict=True))
    return PlannedAssignment(equal.micro_batches, equal.lengths, seconds, min(start.seconds, seconds), ends)

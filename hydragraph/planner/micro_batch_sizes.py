"""Micro-batches cut for each pipeline, as in a run, where the search only uses micro-batches of one size.

Example: 32 sequences on four devices, one of them slow. In micro-batches of two they run 4, 4, 5 and 3 of these,
and the third ends last. Cut for each, they run 9, 9, 9 and 5 sequences at once: no device waits, and none begins twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.price_candidate import form_of
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy

# No limit on a micro-batch's tokens: only its time is needed, not whether it fits.
ANY = 2**62
# Number of halvings of a bisection, for a relative precision of 1e-9, and its effect on a number of sequences.
HALVES = 30
ROUNDING = 1e-6
LEAST_S = 1e-12  # minimum seconds of a sequence


def pipeline_costs(costs: Costs, strategy: Strategy, limit: int | None = None) -> tuple[PipelineCost, ...]:
    """Return the cost of each pipeline; pipelines of one form are computed once.

    Args:
        limit: maximum tokens of a micro-batch; None: as many as fit.
    """
    if strategy.shares:
        return costs.pipelines(strategy)
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    first = dict(zip(forms, strategy.pipelines, strict=True))
    known = {form: costs.pipeline(pipeline, strategy.schedule, limit) for form, pipeline in first.items()}
    return tuple(known[form] for form in forms)


def cut(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> tuple[Assignment, float]:
    """Return a mini-batch cut as in a run, and when the last pipeline ends.

    Raises:
        Unsupported: a sequence is too long for all pipelines, with the owners of `costs`.
    """
    found = assign_pipelines(pipeline_costs(costs, strategy), lengths)
    return Assignment(found.micro_batches, found.lengths), found.seconds


def promised(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> Assignment:
    """Return an approximate assignment of equal sequences with the best cut of every pipeline, ignoring memory.

    A pipeline of S stages takes (m + S - 1) (A n / m + c) for n sequences in m micro-batches: A per sequence and c per
    micro-batch, on its slowest stage. With m = sqrt((S - 1) A n / c), if that is at least 1, these are
    A n + 2 sqrt((S - 1) A c n) + (S - 1) c. This gives the n that end by a given time, which a bisection minimizes.
    """
    kinds = [_Kind.of(each, lengths[0]) for each in pipeline_costs(costs, strategy, ANY)]
    every = Counter(kinds)
    high = 2 * max(kind.end(len(lengths)) for kind in every)  # enough for any rounding
    low = 0.0
    for _ in range(HALVES):
        middle = (low + high) / 2
        if sum(count * kind.by(middle) for kind, count in every.items()) >= len(lengths):
            high = middle
        else:
            low = middle
    left = len(lengths)
    batches: list[tuple[tuple[int, ...], ...]] = []
    for kind in kinds:
        n = min(left, kind.by(high))
        m = min(n, round(kind.micro_batches(n)))
        ends = [left - n * i // max(m, 1) for i in range(m + 1)]
        batches.append(tuple(tuple(range(to, since)) for since, to in pairwise(ends)))
        left -= n
    return Assignment(tuple(batches), tuple(lengths))


@dataclass(frozen=True)
class _Kind:
    """A pipeline: its stages, and seconds of a sequence and of a micro-batch on the slowest of them."""

    stages: int
    each: float
    fixed: float

    @classmethod
    def of(cls, pipeline: PipelineCost, length: int) -> _Kind:
        """Return the kind for sequences of one length. Fitted costs may be negative from noise, and are clamped."""
        return cls(pipeline.stages, max(LEAST_S, float(pipeline.envelope.work(length))), max(0.0, pipeline.c))

    def micro_batches(self, n: int) -> float:
        """Return the best number of micro-batches for n sequences."""
        waiting = (self.stages - 1) * self.each * n
        if not waiting:  # with one stage there is no bubble
            return 1.0
        return max(1.0, math.sqrt(waiting / self.fixed)) if self.fixed else max(1.0, float(n))

    def end(self, n: int) -> float:
        """Return the end of n sequences."""
        m = self.micro_batches(n)
        return (m + self.stages - 1) * (self.each * n / m + self.fixed)

    def by(self, seconds: float) -> int:
        """Return the number of sequences that end by `seconds`."""
        filling = (self.stages - 1) * self.fixed
        if seconds <= filling:
            return 0
        n = (math.sqrt(seconds) - math.sqrt(filling)) ** 2 / self.each
        if (self.stages - 1) * self.each * n < self.fixed:  # in one micro-batch
            n = (seconds / self.stages - self.fixed) / self.each
        return max(0, int(n + ROUNDING))

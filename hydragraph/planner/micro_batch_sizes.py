"""Micro-batches of its own for every pipeline, as a run cuts them: the search counts in micro-batches of one size.

Example: 32 sequences on four devices, one of which is slow. In micro-batches of two they run 4, 4, 5 and 3 of these,
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

# No limit on a micro-batch's tokens: what it takes is asked, not whether it fits.
ANY = 2**62
# Of a bisection: the end is known to a billionth of where it began; and what that does to a number of sequences.
HALVES = 30
ROUNDING = 1e-6
LEAST_S = 1e-12  # that a sequence takes


def pipeline_costs(costs: Costs, strategy: Strategy, limit: int | None = None) -> tuple[PipelineCost, ...]:
    """Return what each pipeline costs; of pipelines of one form one is looked at.

    Args:
        limit: how many tokens micro-batches may have; None: as many as fit.
    """
    if strategy.shares:
        return costs.pipelines(strategy)
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    first = dict(zip(forms, strategy.pipelines, strict=True))
    known = {form: costs.pipeline(pipeline, strategy.schedule, limit) for form, pipeline in first.items()}
    return tuple(known[form] for form in forms)


def cut(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> tuple[Assignment, float]:
    """Return a mini-batch cut as a run would cut it, and when the last pipeline ends.

    Raises:
        Unsupported: a sequence is too long for all pipelines, with owners as the costs have them.
    """
    found = assign_pipelines(pipeline_costs(costs, strategy), lengths)
    return Assignment(found.micro_batches, found.lengths), found.seconds


def promised(costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> Assignment:
    """Return equal sequences cut as would suit every pipeline best, whatever memory says; about, and at once.

    A pipeline of S stages takes (m + S - 1) (A n / m + c) for n sequences in m micro-batches: A a sequence and c a
    micro-batch, on its slowest stage. With m = sqrt((S - 1) A n / c), if that is at least 1, these are
    A n + 2 sqrt((S - 1) A c n) + (S - 1) c; n that end by a time follow, and a bisection over the time.
    """
    kinds = [_Kind.of(each, lengths[0]) for each in pipeline_costs(costs, strategy, ANY)]
    every = Counter(kinds)
    high = 2 * max(kind.end(len(lengths)) for kind in every)  # surely enough, however it is rounded
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
        """Return that of sequences of one length. What was fitted to noise may seem to cost less than nothing."""
        return cls(pipeline.stages, max(LEAST_S, (pipeline.a * length + pipeline.b) * length), max(0.0, pipeline.c))

    def micro_batches(self, n: int) -> float:
        """Return the best number of them for n sequences."""
        waiting = (self.stages - 1) * self.each * n
        if not waiting:  # one stage: none waits for another
            return 1.0
        return max(1.0, math.sqrt(waiting / self.fixed)) if self.fixed else max(1.0, float(n))

    def end(self, n: int) -> float:
        """Return when n sequences end."""
        m = self.micro_batches(n)
        return (m + self.stages - 1) * (self.each * n / m + self.fixed)

    def by(self, seconds: float) -> int:
        """Return how many sequences end by a time."""
        filling = (self.stages - 1) * self.fixed
        if seconds <= filling:
            return 0
        n = (math.sqrt(seconds) - math.sqrt(filling)) ** 2 / self.each
        if (self.stages - 1) * self.each * n < self.fixed:  # in one micro-batch
            n = (seconds / self.stages - self.fixed) / self.each
        return max(0, int(n + ROUNDING))

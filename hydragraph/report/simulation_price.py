"""Simulated times of strategies."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hydragraph.cost.costs import Costs
from hydragraph.cost.timeline import Timeline
from hydragraph.ir.instruction import Stream
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class PricedStrategy:
    strategy: Strategy
    assignment: Assignment
    timeline: Timeline

    @property
    def tokens(self) -> int:
        return sum(n for pipeline in self.assignment.tokens for lengths in pipeline for n in lengths)

    @cached_property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def busy(self) -> list[float]:
        return [self.timeline.busy_s(rank, Stream.COMPUTE) / self.seconds for rank in range(len(self.timeline.ranks))]

    def exposed_s(self, stream: Stream) -> float:
        """Return the mean seconds for which ranks' computation waits for a stream."""
        ranks = range(len(self.timeline.ranks))
        return sum(self.timeline.exposed_s(rank, stream) for rank in ranks) / len(ranks)


def price(costs: Costs, strategy: Strategy, assignment: Assignment) -> PricedStrategy:
    """Simulate one iteration; raise a ValueError if arguments do not match or there are no micro-batches."""
    if not any(assignment.counts):
        raise ValueError(f"micro-batches {list(assignment.counts)}: give at least one pipeline a micro-batch")
    return PricedStrategy(strategy, assignment, costs.simulate(strategy, assignment))


def share(costs: Costs, strategy: Strategy, tokens: int, micro_batches: int, sequences: int = 1) -> list[int]:
    """Distribute equal micro-batches over pipelines; return the number per pipeline.

    Args:
        sequences: sequences of `tokens` tokens per micro-batch.
    """
    strategy.check(costs.outline.layers, costs.ranks, costs.sizes.heads)
    slowest = [max(sum(stage.seconds([tokens] * sequences)) for stage in p.parts) for p in costs.pipelines(strategy)]
    return spread([len(pipeline.stages) for pipeline in strategy.pipelines], slowest, micro_batches)


def spread(depths: Sequence[int], seconds: Sequence[float], micro_batches: int) -> list[int]:
    """Distribute equal micro-batches so that the last pipeline ends as early as possible.

    A pipeline of p stages (`depths`) runs m micro-batches in (m + p - 1) s, where s (`seconds`) is the slowest stage's
    time per micro-batch.
    """
    counts = [0] * len(depths)
    # ends: (end with one more micro-batch, pipeline); depths (1, 2), seconds (1, 0.5), 6
    # micro-batches: counts [2, 4]
    ends = [(p * s, i) for i, (p, s) in enumerate(zip(depths, seconds, strict=True))]
    heapq.heapify(ends)
    for _ in range(micro_batches):
        end, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, (end + seconds[i], i))
    return counts

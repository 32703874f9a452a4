"""Assignment of equally long sequences to pipelines and micro-batches.

A pipeline of S stages takes (m + S - 1) (A n / m + c) for n sequences in m micro-batches, with A seconds per sequence
and c per micro-batch. The best m = sqrt((S - 1) A n / c) gives A n + 2 sqrt((S - 1) A c n) + (S - 1) c.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.schedule_replay import replayed
from hydragraph.cost.stage_costs import stage_rows
from hydragraph.planner.bisection import bisect
from hydragraph.planner.quick_plan import too_long
from hydragraph.spec.assignment import Assignment

PRECISION = 1e-9
ROUNDING = 1e-6
LEAST_S = 1e-12  # per sequence
# Relative sizes to try for a pipeline's first micro-batches and, reversed, for its last.
RAMPS = ((), (0.5,), (0.15,), (0.33, 0.67), (0.1, 0.5), (0.2, 0.4, 0.6, 0.8))


def equally_long(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> tuple[Assignment, float]:
    """Assign equal sequences by exact end times; also return the last pipeline's end time."""
    kinds = _kinds(pipelines, lengths)
    ends_by_pipeline = {p: _Ends(p, kind, lengths[0]) for p, kind in zip(pipelines, kinds, strict=True)}
    ends = [ends_by_pipeline[pipeline] for pipeline in pipelines]
    counts = _counts(kinds, len(lengths))
    able = [p for p, kind in enumerate(kinds) if kind.most]
    rebalance(counts, lambda p, n: ends[p].at(n)[0], able, ROUNDING, math.inf)
    best = [pipeline_ends.at(n) for pipeline_ends, n in zip(ends, counts, strict=True)]
    return _assignment([sizes for _, sizes in best], lengths), max(end for end, _ in best)


def by_formula(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> Assignment:
    """Return a nearly optimal assignment, by the module's formula."""
    kinds = _kinds(pipelines, lengths)
    counts = zip(kinds, _counts(kinds, len(lengths)), strict=True)
    return _assignment([_sizes(n, kind.micro_batches(n)) if n else () for kind, n in counts], lengths)


def rebalance(
    counts: list[int], end: Callable[[int, int], float], takers: Sequence[int], gain: float, moves: float
) -> None:
    """Move work from the last pipeline to the one of `takers` that then ends first, while this saves `gain`."""
    while moves > 0:
        last = max(range(len(counts)), key=lambda p: end(p, counts[p]))
        taker = min((p for p in takers if p != last), key=lambda p: end(p, counts[p] + 1), default=last)
        if taker == last or end(taker, counts[taker] + 1) >= end(last, counts[last]) * (1 - gain):
            return
        counts[last] -= 1
        counts[taker] += 1
        moves -= 1


def _kinds(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> list[_PipelineKind]:
    longest = max(pipeline.max_len for pipeline in pipelines)
    if lengths[0] > longest:
        raise too_long(0, lengths[0], longest)
    kind_by_pipeline = {pipeline: _PipelineKind.of(pipeline, lengths[0]) for pipeline in dict.fromkeys(pipelines)}
    return [kind_by_pipeline[pipeline] for pipeline in pipelines]


def _counts(kinds: Sequence[_PipelineKind], sequences: int) -> list[int]:
    every = Counter(kinds)
    # `by(s)`: number of sequences that a kind finishes in s seconds. Find the time in which all
    # finish.
    high = 2 * max(kind.end(sequences) for kind in every if kind.most)  # margin for rounding
    low, _ = bisect(lambda s: sum(n * kind.by(s) for kind, n in every.items()) >= sequences, 0.0, high, PRECISION)
    counts = [kind.by(low) for kind in kinds]
    # `low` is just below that time. The few remaining sequences go to the pipeline that then ends
    # first.
    for _ in range(sequences - sum(counts)):
        least = min(range(len(kinds)), key=lambda p: kinds[p].end(counts[p] + 1))
        counts[least] += 1
    return counts


def _assignment(sizes: Sequence[Sequence[int]], lengths: Sequence[int]) -> Assignment:
    numbers = iter(range(len(lengths)))
    batches = tuple(tuple(tuple(islice(numbers, size)) for size in pipeline_sizes) for pipeline_sizes in sizes)
    return Assignment(batches, tuple(lengths))


class _Ends:
    def __init__(self, pipeline: PipelineCost, kind: _PipelineKind, length: int) -> None:
        self._pipeline = pipeline
        self._kind = kind
        self._row = cache(lambda size: stage_rows(pipeline.stage_costs, [(length,) * size])[0])
        self.at = cache(self._best)

    def _best(self, n: int) -> tuple[float, tuple[int, ...]]:
        if not n:
            return 0.0, ()
        count = self._kind.micro_batches(n)
        best: tuple[float, int, tuple[int, ...]] = (math.inf, count, ())
        for ramps in product(RAMPS, RAMPS) if self._kind.stages > 1 else (((), ()),):
            # The formula's number of micro-batches is nearly best. Move to the best of five numbers
            # while this helps.
            looked: set[int] = set()
            while around := {m for m in range(count - 2, count + 3) if 0 < m <= n} - looked:
                looked |= around
                every = [(m, _sizes(n, m, *ramps)) for m in sorted(around)]
                best = min(best, *((self._end(sizes), m, sizes) for m, sizes in every))
                count = best[1]
        return best[0], best[2]

    def _end(self, sizes: tuple[int, ...]) -> float:
        if max(sizes) > self._kind.most:
            return math.inf
        different = sorted(set(sizes))
        rows = np.array([self._row(size) for size in different])
        order = np.searchsorted(different, sizes)
        return float(replayed(rows, self._pipeline.schedule, self._pipeline.rows, order).max())


def _sizes(n: int, m: int, first: Sequence[float] = (), last: Sequence[float] = ()) -> tuple[int, ...]:
    weights = np.ones(m)
    weights[: len(first)] = first[:m]
    weights[::-1][: len(last)] = np.minimum(weights[::-1][: len(last)], last[:m])
    # Rounding cumulative sums, not sizes, keeps the total at n.
    ends = np.rint(n * np.cumsum(weights) / weights.sum()).astype(np.int64)
    return tuple(size for size in np.diff(ends, prepend=0).tolist() if size)


@dataclass(frozen=True)
class _PipelineKind:
    """Cost of a pipeline's slowest stage.

    It takes `each` seconds per sequence, and `fixed` per micro-batch of at most `most` sequences.
    """

    stages: int
    each: float
    fixed: float
    most: int

    @classmethod
    def of(cls, pipeline: PipelineCost, length: int) -> _PipelineKind:
        """Return the kind for one sequence length, without negative costs (measurement noise)."""
        sequence_s = max(LEAST_S, float(pipeline.envelope.work(length)))
        return cls(pipeline.stages, sequence_s, max(0.0, pipeline.c), pipeline.max_len // length)

    def least(self, n: int) -> int:
        return -(-n // self.most)

    def micro_batches(self, n: int) -> int:
        return min(n, max(self.least(n), round(self._best(n)))) if n else 0

    def _best(self, n: float) -> float:
        waiting = (self.stages - 1) * self.each * n
        if not waiting:
            return 1.0
        return max(1.0, math.sqrt(waiting / self.fixed)) if self.fixed else max(1.0, n)

    def end(self, n: int) -> float:
        if not self.most:
            return math.inf
        m = max(self._best(n), n / self.most)
        return (m + self.stages - 1) * (self.each * n / m + self.fixed)

    def by(self, seconds: float) -> int:
        if not self.most:
            return 0
        # The module's formula, solved for n: full micro-batches, their best number, a single one.
        full = self.most * (seconds / (self.each * self.most + self.fixed) - (self.stages - 1))
        filling = (self.stages - 1) * self.fixed
        n = 0.0
        if seconds > filling:
            n = (math.sqrt(seconds) - math.sqrt(filling)) ** 2 / self.each
            if (self.stages - 1) * self.each * n < self.fixed:
                n = max(0.0, (seconds / self.stages - self.fixed) / self.each)
        if n > self.most * self._best(n):
            n = full
        return max(0, int(n + ROUNDING))

"""Clock: when each stage would run each micro-batch if every stage were always busy; it orders a rank's tasks.

An iteration takes one unit of time. A stage that runs n micro-batches in it takes 1 / n for each, half of it for the
forward and half for the backward. A micro-batch moves to the next stage half a period after it reached this one, using
the period of the slower of both, turns around half a period after its forward on the last stage, and returns in the
same way. The j-th of a pipeline's c micro-batches enters at j / c. Of P pipelines that share stages, the i-th starts
later by i / P of that interval, so that a shared stage gets their micro-batches in turns, each as often as its pipeline
has them.

One pipeline of 3 stages, in units of half a period, F and B with the micro-batch:

    tick     0   1   2   3   4   5   6   7   8   9
    stage 0  F0      F1      F2  B0  F3  B1      B2
    stage 1      F0      F1  B0  F2  B1  F3  B2
    stage 2          F0  B0  F1  B1  F2  B2  F3  B3

Ranks that run their tasks in clock order cannot deadlock: the inputs of a task are earlier by the clock, and so are the
tasks that its rank runs before it. (The last stage runs each backward directly after its forward, as if the clock
placed it there: not later than it does, and before the stage's next task.) Between two stages the clock adds the same
time to all micro-batches of all pipelines, so they leave one stage in the order in which they reach the other. And as
no stage of a pipeline has fewer micro-batches than the pipeline, no step takes longer than half a period of the
pipeline: at most S - s micro-batches of each pipeline are alive on stage s of S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm
from operator import itemgetter

from hydragraph.ir.schedules.schedule import Action, Shape, Work

Ticks = int  # of a separate clock per group of pipelines that share stages, fine enough that all times are integers


@dataclass(frozen=True)
class Beat:
    """Schedule of one pipeline's micro-batches on one stage.

    Attributes:
        first: number of the first micro-batch.
        arrives: when the previous stage runs its forward; on the first stage: when this stage does.
        forward, backward: when this stage runs its forward and its backward.
        every: time between consecutive micro-batches.
    """

    first: int
    arrives: Ticks
    forward: Ticks
    backward: Ticks
    every: Ticks

    def arrives_at(self, micro_batch: int) -> Ticks:
        """Return when the previous stage runs a micro-batch's forward."""
        return self.arrives + (micro_batch - self.first) * self.every

    def forward_at(self, micro_batch: int) -> Ticks:
        """Return when this stage runs a micro-batch's forward."""
        return self.forward + (micro_batch - self.first) * self.every

    def backward_at(self, micro_batch: int) -> Ticks:
        """Return when this stage runs a micro-batch's backward."""
        return self.backward + (micro_batch - self.first) * self.every

    def returns_at(self, micro_batch: int) -> Ticks:
        """Return when the previous stage runs a micro-batch's backward: both directions take equally long."""
        return self.backward_at(micro_batch) + self.forward - self.arrives


@dataclass(frozen=True)
class Runs:
    """Micro-batches of one pipeline.

    Attributes:
        micro_batches: their numbers.
        stages: total number of micro-batches of each of its stages, including those of other pipelines.
    """

    micro_batches: range
    stages: tuple[int, ...]


def beats(pipelines: Sequence[Runs]) -> list[list[Beat]]:
    """Return the beat of every stage of pipelines that share stages; a pipeline without these is passed alone."""
    times: list[list[list[Fraction]]] = []
    for i, runs in enumerate(pipelines):
        count = len(runs.micro_batches)
        entry = Fraction(i, len(pipelines) * count)
        times.append([[*row, Fraction(1, count)] for row in _times(runs.stages, entry)])
    # Integers are sorted much faster than fractions.
    unit = lcm(*(time.denominator for pipeline in times for row in pipeline for time in row))
    return [
        [Beat(runs.micro_batches.start, *(int(time * unit) for time in row)) for row in rows]
        for runs, rows in zip(pipelines, times, strict=True)
    ]


@lru_cache(maxsize=256)
def beats_of(shape: Shape) -> tuple[tuple[Beat, ...], ...]:
    """Return the beat of every stage of each pipeline of a shape."""
    runs = [
        Runs(numbers, tuple(shape.totals[stage] for stage in chain))
        for numbers, chain in zip(shape.micro_batches, shape.stages, strict=True)
    ]
    return tuple(map(tuple, beats(runs)))


def forwards_of(shape: Shape, stage: int) -> list[tuple[Ticks, Action]]:
    """Return a stage's forwards with their times, in clock order; equal times in the order of pipelines."""
    return sorted(
        (
            (beat.forward_at(m), Action(Work.FORWARD, pipeline, m))
            for pipeline, beat in _beats_at(shape, stage)
            for m in shape.micro_batches[pipeline]
        ),
        key=itemgetter(0),
    )


def backwards_of(shape: Shape, stage: int) -> list[tuple[Ticks, Action]]:
    """Return a stage's backwards, like `forwards_of`."""
    return sorted(
        (
            (beat.backward_at(m), Action(Work.BACKWARD, pipeline, m))
            for pipeline, beat in _beats_at(shape, stage)
            for m in shape.micro_batches[pipeline]
        ),
        key=itemgetter(0),
    )


def _beats_at(shape: Shape, stage: int) -> Iterator[tuple[int, Beat]]:
    every = beats_of(shape)
    for pipeline in shape.pipelines[stage]:
        yield pipeline, every[pipeline][shape.stages[pipeline].index(stage)]


def _times(runs: Sequence[int], entry: Fraction) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """Yield the arrival, forward and backward of a micro-batch on each stage of a pipeline.

    Args:
        runs: total number of micro-batches of each stage.
        entry: time when the micro-batch enters.
    """
    steps = [Fraction(1, 2 * min(one, other)) for one, other in pairwise(runs)]
    forwards = [entry]
    for step in steps:
        forwards.append(forwards[-1] + step)
    backwards = [forwards[-1] + Fraction(1, 2 * runs[-1])]
    for step in reversed(steps):
        backwards.append(backwards[-1] + step)
    yield from zip([entry, *forwards[:-1]], forwards, reversed(backwards), strict=True)

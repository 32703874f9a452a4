"""Idealized times of every stage's forwards and backwards, which determine the order of each rank's tasks.

One pipeline of 3 stages (F0: the forward of micro-batch 0; B0: its backward):

    tick     0   1   2   3   4   5   6   7   8   9
    stage 0  F0      F1      F2  B0  F3  B1      B2
    stage 1      F0      F1  B0  F2  B1  F3  B2
    stage 2          F0  B0  F1  B1  F2  B2  F3  B3

A stage that runs n micro-batches has a period of 1 / n of the iteration: here two ticks, for a forward and a backward.
If stages have different periods:

- Micro-batch j of a pipeline's c enters the first stage at j / c of the iteration. If P pipelines share stages,
  pipeline i is delayed by i / (P c).
- A micro-batch takes half of the longer period of two neighboring stages to move between them.
- On the last stage, a backward begins half a period after its forward.

Ranks that run tasks in clock order cannot deadlock, because inputs have earlier times. Micro-batches arrive in order,
because all take the same time between two stages.

With interleaved stages, a micro-batch passes through G groups of devices in each of C rounds. Micro-batches enter in
sets of G, which finish a round before they start the next. Moving to the next stage takes a full period. F0:1 is the
forward of micro-batch 0 in the second round:

    row 0    F0        F1        F0:1      F1:1      F2   B0:1 F3   B1:1 F2:1 ...
    row 1              F0        F1        F0:1 B0:1 F1:1 B1:1 F2   B0   F3 ...

The first row holds at most (C - 1) G + 2 (G - 1) + 1 activations (Narayanan et al., Efficient Large-Scale Language
Model Training on GPU Clusters, 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm
from operator import itemgetter

from hydragraph.ir.schedules.schedule import Action, ScheduleShape, Work

# In a unit that makes all times integers
Ticks = int


@dataclass(frozen=True)
class StageTimes:
    """Times at which one stage runs a pipeline's micro-batches.

    Attributes:
        arrives: time of the previous stage's forward of micro-batch `first`; on the first stage, equal to `forward`.
        every: time from one micro-batch to the next.
        pause: additional time between sets of `set` micro-batches.
    """

    first: int
    arrives: Ticks
    forward: Ticks
    backward: Ticks
    every: Ticks
    set: int = 1
    pause: Ticks = 0

    def arrives_at(self, micro_batch: int) -> Ticks:
        return self.arrives + self._entry(micro_batch)

    def forward_at(self, micro_batch: int) -> Ticks:
        return self.forward + self._entry(micro_batch)

    def backward_at(self, micro_batch: int) -> Ticks:
        return self.backward + self._entry(micro_batch)

    def _entry(self, micro_batch: int) -> Ticks:
        earlier = micro_batch - self.first
        return earlier * self.every + earlier // self.set * self.pause

    def returns_at(self, micro_batch: int) -> Ticks:
        """Return the time of a micro-batch's backward on the previous stage."""
        return self.backward_at(micro_batch) + self.forward - self.arrives


@lru_cache(maxsize=256)
def beats_of(shape: ScheduleShape) -> tuple[tuple[StageTimes, ...], ...]:
    if any(len(set(rows)) < len(rows) for rows in shape.stages):
        assert len(shape.stages) == 1, "only pipelines without interleaved stages may share stages"
        return (_returning(shape.stages[0]),)
    # times[pipeline][stage]: arrives, forward, backward, every, in fractions of the iteration.
    times: list[list[list[Fraction]]] = []
    for i, (count, chain) in enumerate(zip(shape.counts, shape.stages, strict=True)):
        entry = Fraction(i, len(shape.counts) * count)
        totals = [shape.totals[stage] for stage in chain]
        times.append([[*row, Fraction(1, count)] for row in _times(totals, entry)])
    # unit: ticks per iteration, such that all times are integers.
    unit = lcm(*(time.denominator for pipeline in times for row in pipeline for time in row))
    return tuple(
        tuple(StageTimes(numbers.start, *(int(time * unit) for time in row)) for row in rows)
        for numbers, rows in zip(shape.micro_batches, times, strict=True)
    )


def forwards_of(shape: ScheduleShape, stage: int) -> list[tuple[Ticks, Action]]:
    return _timed(shape, stage, Work.FORWARD, StageTimes.forward_at)


def backwards_of(shape: ScheduleShape, stage: int) -> list[tuple[Ticks, Action]]:
    return _timed(shape, stage, Work.BACKWARD, StageTimes.backward_at)


def _timed(
    shape: ScheduleShape, stage: int, work: Work, at: Callable[[StageTimes, int], Ticks]
) -> list[tuple[Ticks, Action]]:
    actions = (
        (at(beat, m), Action(work, pipeline, m, visit))
        for pipeline, beats in enumerate(beats_of(shape))
        for (row, visit), beat in zip(shape.places[pipeline], beats, strict=True)
        if row == stage
        for m in shape.micro_batches[pipeline]
    )
    return sorted(actions, key=itemgetter(0))


def _returning(rows: Sequence[int]) -> tuple[StageTimes, ...]:
    # A round takes 2 ticks per row, for a forward and a backward. there: rows of this round so far.
    # begin: its first tick.
    size = len(set(rows))
    forwards: list[int] = []
    begin = 0
    there: list[int] = []
    for row in rows:
        if row in there:
            begin += 2 * size
            there = []
        forwards.append(begin + 2 * len(there))
        there.append(row)
    # Micro-batches of a set enter every 2 ticks, but the next set only after all rounds.
    pause = begin
    return tuple(
        StageTimes(0, forwards[max(0, at - 1)], forward, 2 * forwards[-1] + 1 - forward, 2, size, pause)
        for at, forward in enumerate(forwards)
    )


def _times(runs: Sequence[int], entry: Fraction) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    # steps: half of each two neighbors' longer period. runs: micro-batches of each stage.
    steps = [Fraction(1, 2 * min(one, other)) for one, other in pairwise(runs)]
    forwards = [entry]
    for step in steps:
        forwards.append(forwards[-1] + step)
    backwards = [forwards[-1] + Fraction(1, 2 * runs[-1])]
    for step in reversed(steps):
        backwards.append(backwards[-1] + step)
    yield from zip([entry, *forwards[:-1]], forwards, reversed(backwards), strict=True)

"""Schedule: the order in which every stage of some pipelines runs its work, as a value.

A schedule prints as a grid and parses back: a row per stage, a cell per action, and a column per unit of time if every
action takes one and messages take none. F is a forward, B a backward, I and W the halves of a backward that compute the
gradient of the stage's input and those of its weights. `F1.4` is the forward of pipeline 1's micro-batch 4; the number
of pipeline 0 is left out.

    schedule example
    stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

A stage that several pipelines share is one row with the actions of all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.ir.program_outline import Mode

IDLE = "."
_CELL = re.compile(r"([FBIW])(?:(\d+)\.)?(\d+)")


class Work(Enum):
    """Kinds of actions, with their letters in a grid."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    __hash__ = object.__hash__  # faster than the hash of the name, and each kind is a single object


# Kinds of work that produce the gradient of a stage's input.
RETURNING = (Work.BACKWARD, Work.INPUT_GRADIENT)


class Action(NamedTuple):
    """One micro-batch's work on a stage.

    Attributes:
        work: kind of the work.
        pipeline: index of the pipeline in the shape.
        micro_batch: its number, which is unique among all pipelines of the shape.
    """

    work: Work
    pipeline: int
    micro_batch: int

    def __str__(self) -> str:
        pipeline = f"{self.pipeline}." if self.pipeline else ""
        return f"{self.work.value}{pipeline}{self.micro_batch}"


@dataclass(frozen=True)
class Shape:
    """Pipelines that are scheduled together because they share stages; usually one.

    Micro-batches are numbered across pipelines: pipeline 0 has the first `counts[0]` numbers.

    Attributes:
        counts: number of micro-batches of each pipeline, 1 or more.
        stages: numbers of each pipeline's stages, ascending; a shared stage has the same number in all of them.
    """

    counts: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def alone(cls, stages: int, count: int) -> Shape:
        """Return the shape of one pipeline."""
        return cls((count,), (tuple(range(stages)),))

    @cached_property
    def size(self) -> int:
        """Number of stages of all pipelines."""
        return 1 + max(chain[-1] for chain in self.stages)

    @cached_property
    def micro_batches(self) -> tuple[range, ...]:
        """Numbers of the micro-batches of each pipeline."""
        ends = list(accumulate(self.counts, initial=0))
        return tuple(range(first, end) for first, end in pairwise(ends))

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Pipelines of each stage."""
        return tuple(tuple(p for p, chain in enumerate(self.stages) if s in chain) for s in range(self.size))

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Number of micro-batches of each stage."""
        return tuple(sum(self.counts[p] for p in pipelines) for pipelines in self.pipelines)

    @cached_property
    def links(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Pipelines that pass from one stage to another, by these stages."""
        links: dict[tuple[int, int], tuple[int, ...]] = {}
        for pipeline, chain in enumerate(self.stages):
            for link in pairwise(chain):
                links[link] = (*links.get(link, ()), pipeline)
        return links

    def is_last(self, stage: int) -> bool:
        """Return whether a stage computes the loss; pipelines that share a last stage all end there."""
        return any(chain[-1] == stage for chain in self.stages)


class ScheduleTable(NamedTuple):
    """A schedule of one pipeline as arrays, for compiled code (`cost.compiled_replay`).

    If a kind's order for fewer micro-batches is the one for more without the others, one table serves all numbers of
    micro-batches up to its own: skip every action of a micro-batch that does not exist. `skip` makes that fast.

    Attributes:
        work: kind of each action, an index of `WORKS`; -1 after the last [stages, actions].
        micro_batch: number of its micro-batch [stages, actions].
        skip: index of the next action of a smaller micro-batch: all actions before it can be skipped with this one
            [stages, actions].
    """

    work: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    skip: NDArray[np.int32]


WORKS = tuple(Work)


@dataclass(frozen=True)
class Schedule:
    """Order of the work of each stage.

    Attributes:
        kind: name of the kind of schedule.
        actions: actions of each stage, in order.
    """

    kind: str
    actions: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return self.grid()

    def grid(self) -> str:
        """Return the text of the schedule, which `parse` reads; see the module docstring."""
        begins = self._run()
        rows = []
        for row, at in zip(self.actions, begins, strict=True):
            cells: list[str] = []
            for i, action in enumerate(row):
                # Cells of a deadlocked schedule that never run follow without a gap.
                cells += [IDLE] * (at[i] - len(cells) if i < len(at) else 0)
                cells.append(str(action))
            rows.append(cells)
        width = max((len(cell) for cells in rows for cell in cells), default=0)
        name = len(f"stage {len(rows) - 1}")
        lines = [
            f"{f'stage {s}':<{name}}  {' '.join(f'{cell:<{width}}' for cell in cells)}".rstrip()
            for s, cells in enumerate(rows)
        ]
        return "\n".join([f"schedule {self.kind}", *lines])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the schedule of a grid.

        Raises:
            ValueError: a line or a cell cannot be read; the message names it.
        """
        header, *lines = text.strip().splitlines()
        title = header.split()
        if len(title) != 2 or title[0] != "schedule":
            raise ValueError(f"line 1 is {header!r}: begin a grid with 'schedule' and the name of its kind")
        rows = []
        for s, line in enumerate(lines):
            label, number, *cells = line.split() or ("",) * 2
            if (label, number) != ("stage", str(s)):
                raise ValueError(f"line {s + 2} is {line.strip()!r}: begin it with 'stage {s}', one line per stage")
            rows.append(tuple(_parsed(s, i, cell) for i, cell in enumerate(cells) if cell != IDLE))
        return cls(title[1], tuple(rows))

    def check(self, shape: Shape, mode: Mode = "train") -> None:
        """Check that the stages run every micro-batch of a shape, agree on their order, and do not deadlock.

        Args:
            shape: the pipelines.
            mode: "evaluate" has forwards only.

        Raises:
            ValueError: a cell is missing, doubled, superfluous, out of order or deadlocked; the message names it.
        """
        if len(self.actions) != shape.size:
            raise ValueError(f"schedule {self.kind}: it has {len(self.actions)} stages, but {shape.size} are needed")
        for stage, row in enumerate(self.actions):
            self._check_cells(shape, mode, stage, row)
        for (one, other), pipelines in shape.links.items():
            self._check_order(one, other, pipelines, (Work.FORWARD,))
            self._check_order(other, one, pipelines, RETURNING)
        for stage, (row, begins) in enumerate(zip(self.actions, self._run(), strict=True)):
            if len(begins) < len(row):
                raise self._fault(stage, row[len(begins)], "deadlocks: what it needs runs after it")

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of micro-batches that a stage holds at once, from forward to last gradient."""
        row = self.actions[stage]
        last = {action.micro_batch: i for i, action in enumerate(row)}
        alive = most = 0
        for i, action in enumerate(row):
            alive += action.work is Work.FORWARD
            most = max(most, alive)
            alive -= last[action.micro_batch] == i
        return most

    def table(self) -> ScheduleTable:
        """Return the schedule as int32 arrays."""
        longest = max(map(len, self.actions), default=0)
        index = {work: i for i, work in enumerate(WORKS)}
        table = ScheduleTable(*(np.full((len(self.actions), longest), -1, np.int32) for _ in range(3)))
        for s, row in enumerate(self.actions):
            numbers = [action.micro_batch for action in row]
            table.work[s, : len(row)] = [index[action.work] for action in row]
            table.micro_batch[s, : len(row)] = numbers
            table.skip[s, : len(row)] = _next_smaller(numbers)
        return table

    def _check_cells(self, shape: Shape, mode: Mode, stage: int, row: Sequence[Action]) -> None:
        """Check that a stage runs each micro-batch once, and the micro-batches of each pipeline in ascending order."""
        counts = Counter(row)
        position = {action: i for i, action in enumerate(row)}
        for pipeline in shape.pipelines[stage]:
            for m in shape.micro_batches[pipeline]:
                forward, backward, half, other = (Action(work, pipeline, m) for work in WORKS)
                halves = counts[half] > 0 or counts[other] > 0
                needed = [forward]
                if mode != "evaluate":
                    needed += [half, other] if halves else [backward]
                for action in needed:
                    if not counts[action]:
                        raise self._fault(stage, action, "is missing")
                    if counts[action] > 1 or (halves and counts[backward]):
                        raise self._fault(stage, backward if halves and counts[backward] else action, "is doubled")
                for one, other in pairwise(needed):
                    if position[one] > position[other]:
                        raise self._fault(stage, other, f"deadlocks: {one} runs after it")
                counts.subtract(needed)
        for action, count in counts.items():
            if count:
                raise self._fault(stage, action, "is superfluous: remove it")
        latest: dict[tuple[Work, int], int] = {}
        for action in row:
            kind = (action.work, action.pipeline)
            if latest.get(kind, -1) > action.micro_batch:
                raise self._fault(stage, action, f"is out of order: {action.work.value}{latest[kind]} runs before it")
            latest[kind] = action.micro_batch

    def _check_order(self, sender: int, receiver: int, pipelines: Sequence[int], works: Sequence[Work]) -> None:
        """Check that messages leave a stage in the order in which the other one needs them."""
        sent, needed = (
            [action for action in self.actions[stage] if action.pipeline in pipelines and action.work in works]
            for stage in (sender, receiver)
        )
        for one, other in zip(sent, needed, strict=True):
            if one[1:] != other[1:]:
                raise self._fault(receiver, other, f"is out of order: stage {sender} sends {one} first")

    def _fault(self, stage: int, action: Action, what: str) -> ValueError:
        row = self.actions[stage]
        cell = f", cell {row.index(action)}" if action in row else ""
        return ValueError(f"schedule {self.kind}, stage {stage}{cell}: {action} {what}")

    def _run(self) -> list[list[int]]:
        """Return when each action begins if all take one unit of time; a stage's list ends where it deadlocks."""
        chains: dict[int, list[int]] = {}  # stages of each pipeline
        for stage, row in enumerate(self.actions):
            for pipeline in dict.fromkeys(action.pipeline for action in row):
                chains.setdefault(pipeline, []).append(stage)
        ends: dict[tuple[int, bool, int], int] = {}  # (stage, whether it returns, micro-batch) -> end
        begins: list[list[int]] = [[] for _ in self.actions]
        advanced = True
        while advanced:
            advanced = False
            for stage, row in enumerate(self.actions):
                while len(begins[stage]) < len(row):
                    action = row[len(begins[stage])]
                    needs = _needed(chains[action.pipeline], stage, action)
                    if any(each not in ends for each in needs):
                        break
                    free = begins[stage][-1] + 1 if begins[stage] else 0
                    begin = max([free, *(ends[each] for each in needs)])
                    begins[stage].append(begin)
                    if action.work is not Work.WEIGHT_GRADIENT:
                        ends[stage, action.work in RETURNING, action.micro_batch] = begin + 1
                    advanced = True
        return begins


def _needed(chain: Sequence[int], stage: int, action: Action) -> list[tuple[int, bool, int]]:
    """Return what an action waits for: (stage, whether it is a gradient, micro-batch)."""
    at = chain.index(stage)
    m = action.micro_batch
    needs = []
    if action.work is Work.FORWARD:
        if at:
            needs.append((chain[at - 1], False, m))
    elif action.work is Work.WEIGHT_GRADIENT:
        needs.append((stage, True, m))
    else:
        needs.append((stage, False, m))
        if at + 1 < len(chain):
            needs.append((chain[at + 1], True, m))
    return needs


def _parsed(stage: int, at: int, cell: str) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            f"stage {stage}, cell {at} is {cell!r}: write F, B, I or W and a micro-batch (F3, or F1.3 of pipeline 1)"
        )
    return Action(Work(match[1]), int(match[2] or 0), int(match[3]))


def _next_smaller(numbers: Sequence[int]) -> list[int]:
    """Return, for each number, the index of the next smaller one; the length where there is none."""
    result = [len(numbers)] * len(numbers)
    larger: list[int] = []
    for i, number in enumerate(numbers):
        while larger and numbers[larger[-1]] > number:
            result[larger.pop()] = i
        larger.append(i)
    return result

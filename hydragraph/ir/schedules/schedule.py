"""Schedule: the order in which each stage of one or more pipelines runs its forwards and backwards.

The printed grid has a row per stage and a column per unit of time, as if every action took one unit. F is a forward,
and B a backward, whose halves I and W compute the input gradient and the weight gradients. `F1.4` is the forward of
micro-batch 4 in pipeline 1, and `F4` in pipeline 0. Stages on the same devices share a row. With interleaved stages of
one pipeline, `F0:1` is the forward of micro-batch 0 in the row's second stage:

    schedule example
    stage 0  F0   F1   F0:1 F1:1 .    B0:1 .    B1:1 B0   B1
    stage 1  .    F0   F1   F0:1 B0:1 F1:1 B1:1 B0   B1
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IDLE = "."
_CELL = re.compile(r"([FBIW])(?:(\d+)\.)?(\d+)(?::(\d+))?")


class Work(Enum):
    """Kind of an action, with its letter in printed schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Faster than Enum's, which hashes the name
    __hash__ = object.__hash__


# Kinds that compute the gradient of a stage's input.
RETURNING = (Work.BACKWARD, Work.INPUT_GRADIENT)


class Action(NamedTuple):
    """Work of one micro-batch on a stage.

    Attributes:
        visit: index among the pipeline's stages in the row.
    """

    work: Work
    pipeline: int
    micro_batch: int
    visit: int = 0

    def __str__(self) -> str:
        pipeline = f"{self.pipeline}." if self.pipeline else ""
        visit = f":{self.visit}" if self.visit else ""
        return f"{self.work.value}{pipeline}{self.micro_batch}{visit}"


Place = tuple[int, int]


@dataclass(frozen=True)
class ScheduleShape:
    """One pipeline, or several that share stages and a numbering of micro-batches.

    Attributes:
        counts: micro-batches of each pipeline, at least 1.
        stages: row of each stage, by pipeline; stages on the same devices share a row. Rows ascend, except where a
            pipeline returns to earlier devices.
    """

    counts: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def alone(cls, stages: int, count: int) -> ScheduleShape:
        return cls((count,), (tuple(range(stages)),))

    @cached_property
    def size(self) -> int:
        return 1 + max(max(chain) for chain in self.stages)

    @cached_property
    def places(self) -> tuple[tuple[Place, ...], ...]:
        return tuple(map(places_of, self.stages))

    @cached_property
    def micro_batches(self) -> tuple[range, ...]:
        ends = list(accumulate(self.counts, initial=0))
        return tuple(range(first, end) for first, end in pairwise(ends))

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Micro-batches that each row runs, counted once per visit."""
        return tuple(
            sum(count * chain.count(row) for count, chain in zip(self.counts, self.stages, strict=True))
            for row in range(self.size)
        )

    def is_last(self, row: int) -> bool:
        return any(chain[-1] == row and chain.count(row) == 1 for chain in self.stages)


def places_of(rows: Sequence[int]) -> tuple[Place, ...]:
    return tuple((row, rows[:at].count(row)) for at, row in enumerate(rows))


class ScheduleTable(NamedTuple):
    """Schedule of one pipeline as arrays [stages, actions], for compiled code.

    To use the table for m micro-batches, skip the actions of micro-batches m, m + 1, ....

    Attributes:
        work: index in `WORKS` of each action's kind; -1 after a row's last action.
        skip: index of the row's next action with a smaller micro-batch number.
        stage: stage of each action; with interleaved stages, the last rows are empty.
    """

    work: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    skip: NDArray[np.int32]
    stage: NDArray[np.int32]


WORKS = tuple(Work)


@dataclass(frozen=True)
class Schedule:
    kind: str
    actions: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        rows = []
        for row, at in zip(self.actions, self.begins(self._places()), strict=True):
            cells: list[str] = []
            for i, action in enumerate(row):
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
        """Parse a grid; a ValueError names an invalid line or cell."""
        header, *lines = text.strip().splitlines()
        title = header.split()
        if len(title) != 2 or title[0] != "schedule":
            raise ValueError(f"line 1 is {header!r}: write 'schedule' and a kind, such as 'schedule zb-h1'")
        rows = []
        for s, line in enumerate(lines):
            label, number, *cells = line.split() or ("",) * 2
            if (label, number) != ("stage", str(s)):
                raise ValueError(f"line {s + 2} is {line.strip()!r}: begin it with 'stage {s}', one line per stage")
            rows.append(tuple(_parsed(s, i, cell) for i, cell in enumerate(cells) if cell != IDLE))
        return cls(title[1], tuple(rows))

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches in flight on a row, from forward to last gradient."""
        row = self.actions[stage]
        # Activations are needed until the second action of a split backward.
        last = {(action.micro_batch, action.visit): i for i, action in enumerate(row)}
        alive = most = 0
        for i, action in enumerate(row):
            alive += action.work is Work.FORWARD
            most = max(most, alive)
            alive -= last[action.micro_batch, action.visit] == i
        return most

    def table(self, rows: Sequence[int]) -> ScheduleTable:
        longest = max(map(len, self.actions), default=0)
        index = {work: i for i, work in enumerate(WORKS)}
        stage = {place: s for s, place in enumerate(places_of(rows))}
        table = ScheduleTable(*(np.full((len(rows), longest), -1, np.int32) for _ in ScheduleTable._fields))
        for r, row in enumerate(self.actions):
            numbers = [action.micro_batch for action in row]
            table.work[r, : len(row)] = [index[action.work] for action in row]
            table.micro_batch[r, : len(row)] = numbers
            table.skip[r, : len(row)] = _next_smaller(numbers)
            table.stage[r, : len(row)] = [stage[r, action.visit] for action in row]
        return table

    def _places(self) -> tuple[tuple[Place, ...], ...]:
        chains: dict[int, set[tuple[int, int]]] = {}
        for row, actions in enumerate(self.actions):
            for action in actions:
                chains.setdefault(action.pipeline, set()).add((action.visit, row))
        pipelines = range(max(chains, default=-1) + 1)
        return tuple(tuple((row, visit) for visit, row in sorted(chains.get(p, ()))) for p in pipelines)

    def begins(
        self, places: Sequence[Sequence[Place]], lengths: Sequence[Sequence[Any]] | None = None
    ) -> list[list[Any]]:
        """Return when each action begins. A deadlocked row ends before the action that never begins.

        Args:
            lengths: durations of each row's actions, integers or fractions; default: 1.
        """
        # ends: result of a forward or backward -> time when it exists. free: end of each row's last
        # action. Each pass over the rows runs all actions whose inputs exist.
        ends: dict[_End, Any] = {}
        free: list[Any] = [0] * len(self.actions)
        begins: list[list[Any]] = [[] for _ in self.actions]
        advanced = True
        while advanced:
            advanced = False
            for stage, row in enumerate(self.actions):
                while len(begins[stage]) < len(row):
                    action = row[len(begins[stage])]
                    needs = _needed(places[action.pipeline], (stage, action.visit), action)
                    if any(need not in ends for need in needs):
                        break
                    begin = max([free[stage], *(ends[need] for need in needs)])
                    free[stage] = begin + (lengths[stage][len(begins[stage])] if lengths is not None else 1)
                    begins[stage].append(begin)
                    # No action needs weight gradients.
                    if action.work is not Work.WEIGHT_GRADIENT:
                        ends[(stage, action.visit), action.work in RETURNING, action.micro_batch] = free[stage]
                    advanced = True
        return begins


# Place, returning, micro-batch
_End = tuple[Place, bool, int]


def _needed(chain: Sequence[Place], place: Place, action: Action) -> list[_End]:
    at = chain.index(place)
    m = action.micro_batch
    if action.work is Work.FORWARD:
        return [(chain[at - 1], False, m)] if at else []
    if action.work is Work.WEIGHT_GRADIENT:
        return [(place, True, m)]
    following = [(chain[at + 1], True, m)] if at + 1 < len(chain) else []
    return [(place, False, m), *following]


def _parsed(stage: int, at: int, cell: str) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            f"stage {stage}, cell {at} is {cell!r}: write F, B, I or W and a micro-batch, such as F3 (in pipeline 1: "
            "F1.3; on a row's second stage: F3:1)"
        )
    return Action(Work(match[1]), int(match[2] or 0), int(match[3]), int(match[4] or 0))


def _next_smaller(numbers: Sequence[int]) -> list[int]:
    result = [len(numbers)] * len(numbers)
    # larger: indices without a smaller number so far; their numbers ascend. [0, 2, 1] yields [3, 2,
    # 3]; 3 means none.
    larger: list[int] = []
    for i, number in enumerate(numbers):
        while larger and numbers[larger[-1]] > number:
            result[larger.pop()] = i
        larger.append(i)
    return result

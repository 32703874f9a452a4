"""Costs of instructions for a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from hydragraph.cost.traffic import Transfers
from hydragraph.ir.instruction import Op
from hydragraph.ir.schedules.schedule import Work

SHARES: Mapping[Work, float] = {Work.INPUT_GRADIENT: 0.5, Work.WEIGHT_GRADIENT: 0.5}

# One object, because `Transfers` are compared by identity.
NOTHING = Transfers(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class InstructionCosts(Protocol):
    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """Return the seconds of a block's forward or unsplit backward for each micro-batch.

        Args:
            micro_batches: indices of the stage's micro-batches (`ir.rank_program.Role`).
        """

    def copying(self, block: str, ranks: Sequence[int], micro_batch: int) -> float:
        """Return the seconds that the slowest rank needs to copy a block's saved values to or from the host."""

    def moved(self, op: Op, bucket: str) -> Transfers:
        """Return the transfers of a pull, or of a push to first owners."""

    def handed_on(self, bucket: str) -> Transfers:
        """Return a push's transfers from first to second owners; empty if there is one copy."""

    def message_bytes(self, pipeline: int, micro_batch: int) -> float | None:
        """Return the bytes of a pipeline's micro-batch's hidden state; None: messages take no time."""

    def update_s(self, rank: int) -> float: ...

    def commit_s(self) -> float: ...

    def handling(self, rank: int) -> float:
        """Return the factor that multiplies the latency of a rank's messages."""


Part = Literal["computing", "pull", "push", "messages", "ending"]


class ExcludedCosts:
    """Costs of instructions, in which `parts` cost 0 ("ending": commit and update)."""

    def __init__(self, work: InstructionCosts, *parts: Part) -> None:
        self._work = work
        self._parts = frozenset(parts)

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        if "computing" in self._parts:
            return [0.0] * len(micro_batches)
        return self._work.computing(op, block, ranks, micro_batches)

    def copying(self, block: str, ranks: Sequence[int], micro_batch: int) -> float:
        return 0.0 if "computing" in self._parts else self._work.copying(block, ranks, micro_batch)

    def moved(self, op: Op, bucket: str) -> Transfers:
        return NOTHING if op.value in self._parts else self._work.moved(op, bucket)

    def handed_on(self, bucket: str) -> Transfers:
        return NOTHING if "push" in self._parts else self._work.handed_on(bucket)

    def message_bytes(self, pipeline: int, micro_batch: int) -> float | None:
        return None if "messages" in self._parts else self._work.message_bytes(pipeline, micro_batch)

    def update_s(self, rank: int) -> float:
        return 0.0 if "ending" in self._parts else self._work.update_s(rank)

    def commit_s(self) -> float:
        return 0.0 if "ending" in self._parts else self._work.commit_s()

    def handling(self, rank: int) -> float:
        return self._work.handling(rank)

"""Work: the cost of the instructions of one iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from hydragraph.cost.traffic import Pair, Transfers
from hydragraph.ir.instruction import Op
from hydragraph.ir.schedules import schedule

# Share of a backward's seconds that each half takes: the two gradients of a matrix product cost the same. Attention has
# no weights, so the input half of long sequences takes more than this.
SHARES: Mapping[schedule.Work, float] = {schedule.Work.INPUT_GRADIENT: 0.5, schedule.Work.WEIGHT_GRADIENT: 0.5}

# One object for all empty transfers, since equal transfers are priced once by identity.
NOTHING = Transfers(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class Priced(Protocol):
    """Costs that a simulation needs."""

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """Return the seconds of a block's forward or backward for each micro-batch, on a stage's ranks together.

        A half of a backward takes its part of these (`SHARES`).

        Args:
            micro_batches: the numbers of all micro-batches of the stage (`ir.rank_program.Role`).
        """
        ...

    def moved(self, op: Op, bucket: str) -> Transfers:
        """Return the transfers of a pull, or of a push to first owners."""
        ...

    def handed_on(self, bucket: str) -> Transfers:
        """Return the transfers of a push from first to second owners; empty for a home of one copy."""
        ...

    def message_bytes(self, pipeline: int, micro_batch: int) -> float | None:
        """Return the bytes of the hidden state of a pipeline's micro-batch; None: messages take no time.

        Args:
            micro_batch: counted within the pipeline.
        """
        ...

    def update_s(self, rank: int) -> float:
        """Return the seconds of a rank's optimizer step."""
        ...

    def commit_s(self) -> float:
        """Return the seconds of the agreement once all ranks have arrived."""
        ...

    def handling(self, rank: int) -> float:
        """Return a rank's factor on link latency: its time to start and end a message, relative to a healthy rank."""
        ...


@dataclass(frozen=True)
class Work:
    """Explicit costs; absent entries have zero cost.

    Attributes:
        seconds: (operation, block or "", rank) -> seconds of one forward or backward of every micro-batch, or of the
            update; (operation, block, rank, micro-batch) for a single one, which takes precedence.
        pull_bytes, push_bytes, handed_bytes: bucket -> (sending rank, receiving rank) -> bytes; local movements are
            left out.
        activation_bytes: pipeline -> bytes of one micro-batch's hidden state.
        commit: seconds.
        rates: factor on the latency of a rank's messages; default 1.
    """

    seconds: Mapping[tuple[Op, str, int] | tuple[Op, str, int, int], float]
    pull_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)
    push_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    commit: float = 0.0
    rates: Mapping[int, float] = field(default_factory=dict)
    handed_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """See `Priced`."""

        def of(rank: int, m: int) -> float:
            own = self.seconds.get((op, block, rank, m))
            return self.seconds.get((op, block, rank), 0.0) if own is None else own

        return [max(of(rank, m) for rank in ranks) for m in micro_batches]

    def moved(self, op: Op, bucket: str) -> Transfers:
        """See `Priced`."""
        pairs = (self.pull_bytes if op is Op.PULL else self.push_bytes).get(bucket)
        return Transfers.of(pairs) if pairs else NOTHING

    def handed_on(self, bucket: str) -> Transfers:
        """See `Priced`."""
        pairs = self.handed_bytes.get(bucket)
        return Transfers.of(pairs) if pairs else NOTHING

    def message_bytes(self, pipeline: int, micro_batch: int) -> float:
        """See `Priced`."""
        return self.activation_bytes.get(pipeline, 0.0)

    def update_s(self, rank: int) -> float:
        """See `Priced`."""
        return self.seconds.get((Op.UPDATE, "", rank), 0.0)

    def commit_s(self) -> float:
        """See `Priced`."""
        return self.commit

    def handling(self, rank: int) -> float:
        """See `Priced`."""
        return self.rates.get(rank, 1.0)


Part = Literal["computing", "pull", "push", "messages", "ending"]


class Without:
    """Work with some parts at zero cost; "ending" is commit and update."""

    def __init__(self, work: Priced, *parts: Part) -> None:
        self._work = work
        self._parts = frozenset(parts)

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """See `Priced`."""
        if "computing" in self._parts:
            return [0.0] * len(micro_batches)
        return self._work.computing(op, block, ranks, micro_batches)

    def moved(self, op: Op, bucket: str) -> Transfers:
        """See `Priced`."""
        return NOTHING if op.value in self._parts else self._work.moved(op, bucket)

    def handed_on(self, bucket: str) -> Transfers:
        """See `Priced`."""
        return NOTHING if "push" in self._parts else self._work.handed_on(bucket)

    def message_bytes(self, pipeline: int, micro_batch: int) -> float | None:
        """See `Priced`."""
        return None if "messages" in self._parts else self._work.message_bytes(pipeline, micro_batch)

    def update_s(self, rank: int) -> float:
        """See `Priced`."""
        return 0.0 if "ending" in self._parts else self._work.update_s(rank)

    def commit_s(self) -> float:
        """See `Priced`."""
        return 0.0 if "ending" in self._parts else self._work.commit_s()

    def handling(self, rank: int) -> float:
        """See `Priced`."""
        return self._work.handling(rank)

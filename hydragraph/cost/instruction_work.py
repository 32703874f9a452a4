"""Work: what the instructions of one iteration cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from hydragraph.cost.traffic import Pair, Transfers
from hydragraph.ir.instruction import Op

# One object for all that moves nothing, as equal transfers are priced once by identity.
NOTHING = Transfers(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class Priced(Protocol):
    """What a simulation asks."""

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """Return the seconds of a block's forward or backward for each micro-batch, on a stage's ranks together.

        Args:
            micro_batches: the numbers of all that the stage runs (`ir.rank_program.Role`).
        """
        ...

    def moved(self, op: Op, bucket: str) -> Transfers:
        """Return what a pull moves between ranks, or a push to first owners."""
        ...

    def handed_on(self, bucket: str) -> Transfers:
        """Return what a push's first owners then move to second ones; of a home of one copy nothing."""
        ...

    def message_bytes(self, pipeline: int, micro_batch: int) -> float | None:
        """Return the bytes of a pipeline's micro-batch's hidden state; None: messages take no time at all.

        Args:
            micro_batch: counted within the pipeline.
        """
        ...

    def update_s(self, rank: int) -> float:
        """Return the seconds of a rank's optimizer step."""
        ...

    def commit_s(self) -> float:
        """Return what agreeing takes once all ranks are there."""
        ...

    def handling(self, rank: int) -> float:
        """Return how many times as long as a healthy rank one takes to begin and end a message: links' latency."""
        ...


@dataclass(frozen=True)
class Work:
    """Costs given one by one; what is absent costs nothing.

    Attributes:
        seconds: (operation, block or "", rank) -> seconds of one forward or backward of every micro-batch, or of the
            update; (operation, block, rank, micro-batch) of one of them, which counts before that.
        pull_bytes, push_bytes, handed_bytes: bucket -> (sending rank, receiving rank) -> bytes; local movements are
            left out.
        activation_bytes: pipeline -> bytes of one micro-batch's hidden state.
        commit: seconds.
        rates: how many times as long a rank takes to begin and end a message; 1 where it is absent.
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
    """Work of which some parts cost nothing; "ending" is commit and update."""

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

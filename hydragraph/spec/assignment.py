"""Which pipeline computes which sequences of a mini-batch, in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """For one iteration, sequences -> (pipeline, micro-batch).

    Attributes:
        micro_batches: per pipeline, per micro-batch, the indices of its sequences. A pipeline may get none.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many micro-batches each pipeline runs."""
        return tuple(len(m) for m in self.micro_batches)

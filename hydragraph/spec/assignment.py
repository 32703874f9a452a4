"""Assignment of a mini-batch's sequences to pipelines and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class Assignment:
    """Assignment of sequences to pipelines and micro-batches for one iteration.

    Attributes:
        micro_batches: for each pipeline and micro-batch, the indices of its sequences.
        lengths: tokens in each sequence.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...] = ()

    @classmethod
    def even(cls, counts: Sequence[int], tokens: int | Sequence[int], sequences: int = 1) -> Assignment:
        """Return an assignment with `sequences` sequences in each micro-batch.

        Args:
            counts: number of micro-batches of each pipeline.
            tokens: sequence length in tokens, or a list with one length per pipeline.
        """
        per_pipeline = [tokens] * len(counts) if isinstance(tokens, int) else tokens
        # Sequences are numbered across pipelines: counts (1, 2), 2 per micro-batch: ((0, 1),) and
        # ((2, 3), (4, 5)).
        starts = iter(range(0, sum(counts) * sequences, sequences))
        micro_batches = [tuple(tuple(range(i, i + sequences)) for i in islice(starts, count)) for count in counts]
        lengths = tuple(n for count, n in zip(counts, per_pipeline, strict=True) for _ in range(count * sequences))
        return cls(tuple(micro_batches), lengths)

    @property
    def tokens(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Number of tokens in each sequence, for every pipeline and micro-batch.

        Raises:
            ValueError: `lengths` has no entry for some sequence.
        """
        most = max((i for p in self.micro_batches for m in p for i in m), default=-1)
        if most >= len(self.lengths):
            raise ValueError(
                f"the assignment uses sequence index {most}, but has {len(self.lengths)} lengths: give "
                "Assignment(micro_batches, lengths) the length of each sequence"
            )
        return tuple(tuple(tuple(self.lengths[i] for i in m) for m in p) for p in self.micro_batches)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(m) for m in self.micro_batches)

    @property
    def one_by_one(self) -> Assignment:
        """The assignment with one sequence per micro-batch."""
        alone = tuple(tuple((i,) for m in pipeline for i in m) for pipeline in self.micro_batches)
        return Assignment(alone, self.lengths)

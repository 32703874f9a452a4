"""Training workload of a plan."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

# Planning larger mini-batches takes minutes
MOST_SEQUENCES = 100_000


@dataclass(frozen=True)
class Workload:
    """A mini-batch of equally long sequences, or sample mini-batches of varying lengths.

    Attributes:
        sequences: number of equally long sequences.
        length: tokens per sequence.
        lengths: for each sample mini-batch, its sequences' lengths in tokens.

    Example: `Workload(sequences=128, length=2048)`; `Workload(lengths=[[512, 90, 3000], [700, 2048]])`.
    """

    sequences: int = 0
    length: int = 0
    lengths: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "lengths", tuple(tuple(map(index, batch)) for batch in self.lengths))
        except TypeError:
            raise ValueError(
                f"'lengths' is {reprlib.repr(self.lengths)}: give one list per mini-batch, with its "
                "sequences' lengths in tokens as whole numbers, as in [[512, 90, 3000], [700, 2048]]"
            ) from None
        fixed = bool(self.sequences or self.length)
        if fixed == bool(self.lengths):
            raise ValueError(
                "a workload is a number of sequences of one length (sequences=128, length=2048), or the lengths of "
                "sample mini-batches (lengths=[[512, 90], [700]]): give one of the two"
            )
        if fixed and not (_counts(self.sequences) and _counts(self.length)):
            raise ValueError(f"'sequences' is {self.sequences!r}, 'length' {self.length!r}: give whole numbers above 0")
        check_sequences(self.sequences)
        for i, batch in enumerate(self.lengths):
            if not batch or min(batch) < 1:
                raise ValueError(f"lengths[{i}] is {list(batch)[:8]}: give at least one length, each above 0")

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.lengths)) if self.lengths else ((self.length,) * self.sequences,)

    @property
    def longest(self) -> int:
        return max(map(max, self.batches))

    @property
    def typical(self) -> Workload:
        """T^2 / Q sequences of Q / T tokens, with T and Q the mean sums of lengths and of squared lengths."""
        if not self.lengths:
            return self
        tokens = sum(map(sum, self.batches)) / len(self.batches)
        squares = sum(n * n for batch in self.batches for n in batch) / len(self.batches)
        length = max(1, round(squares / tokens))
        return Workload(max(1, round(tokens / length)), length)

    def __str__(self) -> str:
        if not self.lengths:
            tokens = f"{self.length:,} token{'s' * (self.length > 1)}"
            return f"{self.sequences} sequence{'s' * (self.sequences > 1)} of {tokens}"
        counts = [len(batch) for batch in self.batches]
        spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        batches = f"{len(counts)} sample mini-batch{'es' * (len(counts) > 1)}"
        return f"{batches} of {spread} sequence{'s' * (max(counts) > 1)}, of up to {self.longest:,} tokens"


def full_lengths(tokens: int, longest: int) -> list[int]:
    """Divide a mini-batch's tokens into sequences of `longest` tokens and at most one shorter one."""
    count, rest = divmod(max(tokens, longest), longest)
    check_sequences(count)
    return [longest] * count + [rest] * (rest > 1)


def check_sequences(count: int) -> None:
    if count > MOST_SEQUENCES:
        raise ValueError(f"a mini-batch would have {count:,} sequences: give at most {MOST_SEQUENCES:,}")


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

"""The bytes that pulls and pushes move, exactly: as the link says, not as a model estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hydragraph.cost.messages import GRADIENT_BYTES
from hydragraph.ir.link import Slices, copy, reduce
from hydragraph.ir.program import Program
from hydragraph.passes.layouts import BucketLayouts

Direction = Literal["pull", "push"]
DIRECTIONS: tuple[Direction, ...] = ("pull", "push")


@dataclass(frozen=True)
class Traffic:
    """What one direction moves in one step.

    Attributes:
        pairs: (sending rank, receiving rank) -> bytes between two different ranks.
        local: bytes that stay on their rank.
    """

    pairs: Mapping[tuple[int, int], int]
    local: int

    @property
    def total(self) -> int:
        """Bytes between ranks."""
        return sum(self.pairs.values())

    @property
    def most(self) -> int:
        """The most bytes that one rank sends or receives."""
        loads: dict[tuple[str, int], int] = defaultdict(int)
        for (source, target), size in self.pairs.items():
            loads["out", source] += size
            loads["in", target] += size
        return max(loads.values(), default=0)


def traffic(program: Program, placed: Sequence[BucketLayouts], direction: Direction) -> Traffic:
    """Return what a pull (in the compute dtype) or a push (in fp32, of what learns) moves."""
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for bucket_layouts in placed:
        if direction == "pull":
            _add(pairs, copy(bucket_layouts.home, bucket_layouts.used), program.dtype.itemsize)
        elif bucket_layouts.bucket.learns:
            _add(pairs, reduce(bucket_layouts.used, bucket_layouts.home), GRADIENT_BYTES)
    between = {pair: size for pair, size in sorted(pairs.items()) if pair[0] != pair[1]}
    return Traffic(between, sum(size for (a, b), size in pairs.items() if a == b))


def _add(pairs: dict[tuple[int, int], int], slices: Slices, itemsize: int) -> None:
    for source, target, elements in zip(
        slices.src.tolist(), slices.dst.tolist(), (slices.hi - slices.lo).tolist(), strict=True
    ):
        pairs[source, target] += elements * itemsize

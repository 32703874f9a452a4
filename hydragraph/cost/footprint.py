"""Memory of one block for a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hydragraph.passes.offload import moves


class MicroBatch(NamedTuple):
    """Size of a packed micro-batch, including padding."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class HalvesFootprint:
    """Memory of the two halves of a block's backward, in bytes.

    Attributes:
        first, second: peak of the values that each half creates, including results.
        postponed: values that the first half leaves for the second.
        keeps: which of "hidden", "aux", "output" and "tangent" the second half needs; not in `postponed`.
    """

    first: int
    second: int
    postponed: int
    keeps: frozenset[str]


@dataclass(frozen=True)
class Footprint:
    """Memory of one block, in bytes.

    Attributes:
        output: the hidden state (for the last block, the loss).
        saved: values saved for the backward, excluding inputs and output.
        keeps: which of "hidden", "aux" and "output" the backward needs; not in `saved`.
        forward, backward: peak of the values that each graph creates, including results.
        small: part of `saved` that is never offloaded.
    """

    output: int
    saved: int
    keeps: frozenset[str]
    forward: int
    backward: int
    gradients: int
    small: int = 0

    def offloaded(self, hidden: int) -> tuple[int, frozenset[str]]:
        """Return the offloaded bytes for an input of `hidden` bytes, and the part of `keeps` that stays on the device.

        Auxiliary values stay, because all blocks share them.
        """
        sizes = {name: size for name, size in (("hidden", hidden), ("output", self.output)) if name in self.keeps}
        moved = {name: size for name, size in sizes.items() if moves(size)}
        return self.saved - self.small + sum(moved.values()), self.keeps - moved.keys()

    @property
    def halves_estimate(self) -> HalvesFootprint:
        both = self.saved + self.backward
        return HalvesFootprint(both, self.backward, both, self.keeps | {"tangent"})

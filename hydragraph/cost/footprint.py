"""Memory of one block for a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.passes.offload import moves


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch, with padding."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class HalvesFootprint:
    """Memory of the halves of a block's backward, in bytes.

    Attributes:
        first, second: peaks of their own values, with results.
        postponed: what the input half makes or keeps for the weight half.
        keeps: values kept unchanged: "hidden", "aux", "output" or "tangent".
    """

    first: int
    second: int
    postponed: int
    keeps: frozenset[str]


@dataclass(frozen=True)
class Footprint:
    """Memory of one block, in bytes.

    Attributes:
        output: hidden state (the last block: loss).
        saved: beyond inputs and output.
        keeps: values saved unchanged: "hidden", "aux" or "output".
        forward, backward: peaks of their own values, with results.
        gradients: of its parameters.
        small: part of `saved` that offloading leaves on the device.
    """

    output: int
    saved: int
    keeps: frozenset[str]
    forward: int
    backward: int
    gradients: int
    small: int = 0

    def offloaded(self, hidden: int) -> tuple[int, frozenset[str]]:
        """Return the offloaded bytes if the input has `hidden` bytes, and the part of `keeps` that stays.

        Auxiliary values stay, because all blocks keep the same ones.
        """
        sizes = {name: size for name, size in (("hidden", hidden), ("output", self.output)) if name in self.keeps}
        moved = {name: size for name, size in sizes.items() if moves(size)}
        return self.saved - self.small + sum(moved.values()), self.keeps - moved.keys()

    @property
    def halves_estimate(self) -> HalvesFootprint:
        """Upper estimate: the input half keeps what it reads and makes."""
        both = self.saved + self.backward
        return HalvesFootprint(both, self.backward, both, self.keeps | {"tangent"})

"""Cost and memory of one block in each kind of stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydragraph.cost.curves import Constants as Constants
from hydragraph.cost.curves import Curve, Table

Scheme = tuple[int, int]  # (tp, pp): deployment of one pipeline on tp * pp devices

# Values that every stage computes once per micro-batch, such as rotary tables.
AUX = "aux"
# Per element of a home shard: fp32 weight, gradient and AdamW's two moments.
HOME_BYTES = 16
# Per element of a stage's gradients, in fp32.
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class MemoryLines:
    """Memory of one compiled block for one micro-batch, as lines over its tokens.

    Each line is (bytes, bytes per token); see `cost.footprint.Footprint` for their meaning.

    Attributes:
        output, saved, forward, backward: as in the footprint.
        keeps: the inputs that it saves unchanged.
        added: whether products accumulate gradients in place.
    """

    output: tuple[float, float]
    saved: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    keeps: tuple[str, ...] = ()
    added: bool = False


@dataclass(frozen=True)
class BlockPiece:
    """Cost and memory of one block on a rank of a kind of stage.

    Attributes:
        seconds: seconds of forward and backward together for one micro-batch; approximate if those are tables.
        parameters: elements of its weights on the rank.
        kept: bytes per token held from a forward to its backward.
        working, fixed: bytes of temporary values, per token and in addition.
        frozen: elements of its weights that get no gradient.
        forward, backward: separate curves; None: the forward is a third of `seconds`, or a quarter with recomputation.
        reduced: hidden states that tensor-parallel ranks sum in forward and backward, if the seconds exclude these
            sums.
        during_sums: for each tensor-parallel sum of the backward, seconds per token of the weight gradients that are
            computed while it runs (`passes/overlap_collectives.py`).
        before_sums: for each of these sums, first those of the forward, seconds per token of the products that it adds
            up over the ranks; 0 if it adds up something else.
        held: its memory in more detail, if known.
    """

    seconds: Constants
    parameters: int = 0
    kept: float = 0.0
    working: float = 0.0
    fixed: float = 0.0
    frozen: int = 0
    forward: Curve | None = None
    backward: Curve | None = None
    reduced: tuple[int, int] = (0, 0)
    during_sums: tuple[float, ...] = ()
    before_sums: tuple[float, ...] = ()
    held: MemoryLines | None = None

    @classmethod
    def apart(cls, forward: Curve, backward: Curve, **sizes: Any) -> BlockPiece:
        """Return a piece with separate curves; `sizes` are the other fields."""
        one, two = (c.constants() if isinstance(c, Table) else c for c in (forward, backward))
        together = Constants.sum([(1, one), (1, two)])
        return cls(together, **sizes, forward=forward, backward=backward)

    @property
    def forward_only(self) -> Curve:
        """The forward's curve of a piece without a backward, such as auxiliary values."""
        return self.forward if self.forward is not None else self.seconds

    def parts(self, recompute: bool | float) -> tuple[Curve, Curve]:
        """Return the forward and backward curves."""
        if self.forward is not None and self.backward is not None:
            return self.forward, self.backward
        # Backward computes two products for each of the forward's.
        part = 1 / 4 if recompute else 1 / 3
        return self.seconds.times(part), self.seconds.times(1 - part)


@dataclass(frozen=True)
class PricedDevice:
    """The device on which pieces were measured.

    Attributes:
        memory: bytes that a rank may use, without the margin.
        elements: number of elements of the whole model's parameters.
        itemsize: bytes of an element in the compute dtype.
        frozen: elements of parameters without gradient and moments.
    """

    name: str
    memory: float
    elements: int
    itemsize: int
    frozen: int = 0

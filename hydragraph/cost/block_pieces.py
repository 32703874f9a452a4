"""Cost and memory of one block in each kind of stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydragraph.cost.curves import Constants as Constants

Scheme = tuple[int, int]  # (tp, pp): a pipeline of pp stages with tp devices each

# Values computed once per stage and micro-batch, such as rotary tables.
AUX = "aux"
# Bytes per element: fp32 weight, gradient and AdamW's two moments.
HOME_BYTES = 16
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class MemoryLines:
    """Memory of one compiled block, as linear functions (bytes, bytes per token) of a micro-batch's tokens.

    Attributes:
        output, saved, forward, backward, keeps: as in `cost.footprint.Footprint`.
        added: whether matrix products accumulate weight gradients in place.
    """

    output: tuple[float, float]
    saved: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    keeps: tuple[str, ...] = ()
    added: bool = False


@dataclass(frozen=True)
class BlockPiece:
    """Cost and memory of one block on a rank, in one kind of stage.

    Attributes:
        seconds: seconds of forward and backward together.
        parameters: parameter elements on the rank.
        kept: bytes per token that the forward saves for the backward.
        working: temporary bytes per token.
        fixed: temporary bytes that do not depend on the tokens.
        frozen: parameter elements without gradient.
        forward, backward: separate curves; None: the forward takes a third of `seconds`, a quarter with recomputation.
        reduced: number of hidden states that the tensor-parallel ranks sum in (forward, backward); `seconds` excludes
            these sums.
        during_sums: for each of these sums in the backward, seconds per token of the weight gradients computed
            during it (`passes/overlap_collectives.py`).
        before_sums: for each sum (forward first), seconds per token of the matrix product before it; 0: none.
    """

    seconds: Constants
    parameters: int = 0
    kept: float = 0.0
    working: float = 0.0
    fixed: float = 0.0
    frozen: int = 0
    forward: Constants | None = None
    backward: Constants | None = None
    reduced: tuple[int, int] = (0, 0)
    during_sums: tuple[float, ...] = ()
    before_sums: tuple[float, ...] = ()
    held: MemoryLines | None = None

    @classmethod
    def apart(cls, forward: Constants, backward: Constants, **sizes: Any) -> BlockPiece:
        return cls(Constants.sum([(1, forward), (1, backward)]), **sizes, forward=forward, backward=backward)

    @property
    def forward_only(self) -> Constants:
        """Forward curve of a piece that has no backward."""
        return self.forward if self.forward is not None else self.seconds

    def parts(self, recompute: bool | float) -> tuple[Constants, Constants]:
        if self.forward is not None and self.backward is not None:
            return self.forward, self.backward
        part = 1 / 4 if recompute else 1 / 3
        return self.seconds.times(part), self.seconds.times(1 - part)


@dataclass(frozen=True)
class PricedDevice:
    """The device on which block costs were measured.

    Attributes:
        memory: bytes that a rank may use.
        elements: number of the model's parameter elements.
        itemsize: bytes per element in the compute dtype.
        frozen: number of parameter elements without gradient and moments.
    """

    name: str
    memory: float
    elements: int
    itemsize: int
    frozen: int = 0

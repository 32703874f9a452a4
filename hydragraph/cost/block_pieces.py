"""Cost and memory of one block in each kind of stage."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.cost.curves import Constants as Constants

# (tp, pp): a pipeline of pp stages with tp devices each
Scheme = tuple[int, int]

# Values of a stage and micro-batch, such as rotary tables.
AUX = "aux"
# Bytes per element of fp32 weight, gradient and AdamW's two moments.
HOME_BYTES = 16
# Gradients are accumulated and pushed in fp32
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class MemoryLines:
    """Memory of one block for a micro-batch, as (bytes, bytes per token).

    Attributes:
        output, saved, forward, backward, keeps: as in `cost.footprint.Footprint`.
        added: whether matrix products accumulate weight gradients in place.
    """

    output: tuple[float, float] = (0.0, 0.0)
    saved: tuple[float, float] = (0.0, 0.0)
    forward: tuple[float, float] = (0.0, 0.0)
    backward: tuple[float, float] = (0.0, 0.0)
    keeps: tuple[str, ...] = ()
    added: bool = False


@dataclass(frozen=True)
class BlockPiece:
    """Cost and memory of one block on a rank, in one kind of stage.

    Attributes:
        forward, backward: seconds, without tensor-parallel sums.
        parameters: parameter elements on the rank.
        frozen: parameter elements without gradient.
        reduced: numbers of hidden states that tensor-parallel ranks sum in the forward and in the backward.
        during_sums: for each backward sum, seconds per token of the weight gradients computed during the sum
            (`passes/overlap_collectives.py`).
        before_sums: for each sum (forward first), seconds per token of the matrix product before the sum; 0: none.
        held: memory; None: unknown.
    """

    forward: Constants
    backward: Constants
    parameters: int = 0
    frozen: int = 0
    reduced: tuple[int, int] = (0, 0)
    during_sums: tuple[float, ...] = ()
    before_sums: tuple[float, ...] = ()
    held: MemoryLines | None = None


@dataclass(frozen=True)
class PricedDevice:
    """Device on which block costs were measured.

    Attributes:
        memory: bytes that a rank may use.
        itemsize: bytes per element in the compute dtype.
    """

    name: str
    memory: float
    itemsize: int

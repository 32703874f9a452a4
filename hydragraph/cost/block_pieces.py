"""What one block costs in each kind of stage, and what it holds there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydragraph.cost.curves import Constants as Constants
from hydragraph.cost.curves import Curve, Table

Scheme = tuple[int, int]  # (tp, pp): how one pipeline is deployed, on tp * pp devices

# Stands for what every stage computes once per micro-batch, such as rotary tables.
AUX = "aux"
# Per element of a home shard: weight, gradient and AdamW's two moments in fp32.
HOME_BYTES = 16
# Per element of a stage's gradients, which are added up in fp32.
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Held:
    """What one compiled block holds for one micro-batch, in bytes, as lines over its tokens.

    Each is (bytes, bytes per token); see `cost.footprint.Footprint` for what they mean.

    Attributes:
        output, saved, forward, backward: of the footprint.
        keeps: the inputs that it saves as they are.
        added: whether products add gradients up where they are kept, instead of making them first.
    """

    output: tuple[float, float]
    saved: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    keeps: tuple[str, ...] = ()
    added: bool = False


@dataclass(frozen=True)
class Piece:
    """What one block costs on a rank of a stage of some kind, and what it holds there.

    Attributes:
        seconds: of its forward and backward for one micro-batch; a may be 0 (an embedding has no attention). Where
            `forward` and `backward` are tables, constants that come near them, which search goes by.
        parameters: elements of its weights on the rank.
        kept: bytes per token of a micro-batch, from its forward to its backward.
        working: bytes per token that its graphs make and drop again.
        fixed: bytes that they make and drop again whatever the tokens.
        frozen: elements of its weights that get no gradient.
        forward, backward: apart; None: the forward is a third of `seconds`, a quarter where it is computed again.
        reduced: how many hidden states its tensor-parallel ranks add up forward, and backward, where these seconds
            leave that out; what was measured includes it.
        held: what it holds, in more detail; None: only the sums above are known.
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
    held: Held | None = None

    @classmethod
    def apart(cls, forward: Curve, backward: Curve, **sizes: Any) -> Piece:
        """Return a piece whose forward and backward are known apart; `sizes` are its other fields."""
        # Search goes by constants, so tables get some that come near them; exact seconds are read from the tables.
        one, two = (c.constants() if isinstance(c, Table) else c for c in (forward, backward))
        together = Constants(one.a + two.a, one.b + two.b, one.c + two.c)
        return cls(together, **sizes, forward=forward, backward=backward)

    def parts(self, recompute: bool) -> tuple[Curve, Curve]:
        """Return its forward and backward."""
        if self.forward is not None and self.backward is not None:
            return self.forward, self.backward
        # Backward computes two products for each of forward's, and forward's once more where it recomputes.
        part = 1 / 4 if recompute else 1 / 3
        return self.seconds.times(part), self.seconds.times(1 - part)


@dataclass(frozen=True)
class PricedDevice:
    """Where pieces were measured.

    Attributes:
        name: what it calls itself.
        memory: bytes that a rank may use; the margin is already left out.
        elements: of the whole model's parameters.
        itemsize: bytes of an element in the dtype that the model computes in.
        frozen: elements of those parameters that get no gradient, and have no moments at home.
    """

    name: str
    memory: float
    elements: int
    itemsize: int
    frozen: int = 0

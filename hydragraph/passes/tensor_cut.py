"""Cut values, and the result of the analysis of a template (`hydragraph.passes.find_cuts`).

    origin   a column-parallel product (or embedding): where a cut begins
    element  one entry of an origin's cut dimension
    unit     the smallest number of elements that stay together on a rank, such as the 16 of a head
    segment  a range of elements that is cut separately, such as q in a fused product of q, k and v

In a fused product of q, k and v with 4 heads of 16 each, k [1, T, 64] is `Cut(dim=2, scale=1, start=64, length=64)`,
and its heads [1, T, 4, 16] are `Cut(2, 16, 64, 64)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from hydragraph.passes.graph_node import operands, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Cut:
    """Cut of a value: each rank holds some units along one dimension.

    Attributes:
        scale: elements of the origin's dimension per element of this one (1 for columns, D for heads); a fraction after
            attention whose results have other sizes than its queries.
        start, length: the range of the origin's dimension that this value covers.
        lead: the product that `scale`, `start` and `length` refer to.
        origins: all products it comes from, cut in the same way.
        outer: sizes that a view merged into the dimension: [T, 4, 16] as [T * 4, 16] has (T,).
        pieces: cuts of the values joined along the dimension.
    """

    dim: int
    scale: int | Fraction
    start: int
    length: int
    lead: fx.Node
    origins: frozenset[fx.Node]
    outer: tuple[Any, ...] = ()
    pieces: tuple[Cut, ...] = ()

    @property
    def entries(self) -> int:
        """Size of the dimension."""
        return sum(piece.entries for piece in self.pieces) if self.pieces else int(self.length / self.scale)


@dataclass
class Origin:
    """Facts about one column-parallel product.

    Attributes:
        bounds: first elements of all segments but the first.
        heads: whether units are heads.
        head: elements of a head, or 0.
    """

    unit: int = 1
    bounds: set[int] = field(default_factory=set)
    heads: bool = False
    head: int = 0


@dataclass
class Cuts:
    """Result of the analysis: a cut for every cut value, and the roles of products.

    Attributes:
        cut: node -> Cut; other nodes are replicated.
        columns: column-parallel products and vocabulary-parallel embeddings.
        unknown: replicated product -> the operator without a rule that prevents cutting it.
    """

    cut: dict[fx.Node, Cut] = field(default_factory=dict)
    columns: set[fx.Node] = field(default_factory=set)
    rows: dict[fx.Node, Cut] = field(default_factory=dict)
    origins: dict[fx.Node, Origin] = field(default_factory=dict)
    unknown: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, node: Any) -> Cut | None:
        """Return the cut of an operand; None if it is replicated or not a node."""
        return self.cut.get(node) if isinstance(node, fx.Node) else None

    def refine(self, cut: Cut, unit: int) -> None:
        """Forbid cuts of a value's origins finer than `unit` elements of its lead."""
        # The coarsest requirement wins.
        lead = self.origins[cut.lead]
        for origin in (self.origins[o] for o in cut.origins):
            own = unit * origin.head // lead.head if origin.head and lead.head else unit
            origin.unit = max(origin.unit, own)

    def bound(self, cut: Cut, at: int) -> None:
        """Record a boundary between fused segments."""
        for origin in cut.origins:
            if 0 < at < width(origin):
                self.origins[origin].bounds.add(at)

    def unit(self, cut: Cut) -> int:
        """Return a cut value's unit, in elements of its lead."""
        lead = self.origins[cut.lead]
        units = [
            origin.unit * lead.head // origin.head if origin.head and lead.head else origin.unit
            for origin in (self.origins[o] for o in cut.origins)
        ]
        return max(units, default=1)


def width(node: fx.Node) -> int:
    """Return the size of the dimension that a column-parallel product or embedding cuts."""
    return int(shape(operands(node)[0])[0] if node.target is aten.embedding.default else shape(node)[-1])

"""Cuts: descriptions of sharded values, found by `hydragraph.passes.find_cuts`.

    origin   a column-parallel product or embedding, whose result is sharded
    element  one entry of an origin's sharded dimension
    unit     the smallest number of elements that stay together on a rank, such as the 16 of a head
    segment  a range of elements sharded separately, such as q in a fused product of q, k and v

In a fused product of q, k and v with 4 heads of 16 each, k [1, T, 64] is `Cut(dim=2, scale=1, start=64, length=64)`,
and its heads [1, T, 4, 16] are `Cut(2, 16, 64, 64)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from hydragraph.passes.graph_node import operands, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Cut:
    """Sharding of a value: each rank has some units along one dimension.

    Attributes:
        scale: elements of the lead per entry of the dimension (1 for columns, D for heads); a fraction if value heads
            and query heads differ in size.
        start, length: range of the lead's elements that this value covers.
        lead: the origin that `scale`, `start` and `length` refer to.
        origins: all origins of the value, sharded alike.
        outer: sizes that a view merged into the dimension: (T,) for [T, 4, 16] as [T * 4, 16].
        pieces: cuts of values concatenated along the dimension.
        parts: pairs (origin, k): element i of the lead corresponds to element i + k of the origin.
    """

    dim: int
    scale: int | Fraction
    start: int
    length: int
    lead: fx.Node
    origins: frozenset[fx.Node]
    outer: tuple[Any, ...] = ()
    pieces: tuple[Cut, ...] = ()
    parts: frozenset[tuple[fx.Node, int]] = frozenset()

    @property
    def plain(self) -> bool:
        return not self.outer and not self.pieces

    @property
    def entries(self) -> int:
        """Global size of the sharded dimension."""
        return sum(piece.entries for piece in self.pieces) if self.pieces else int(self.length / self.scale)


@dataclass
class Origin:
    """Units and segments of a column-parallel product.

    Attributes:
        bounds: first element of every segment except the first.
        head: elements per head, or 0 without heads.
    """

    unit: int = 1
    bounds: set[int] = field(default_factory=set)
    heads: bool = False
    head: int = 0


@dataclass
class Cuts:
    """Result of `find_cuts`: the cut of every sharded value, and the roles of products.

    Attributes:
        columns: column-parallel products and vocabulary-parallel embeddings.
        unknown: for each replicated product, the operator without a rule that prevents sharding it.
    """

    cut: dict[fx.Node, Cut] = field(default_factory=dict)
    columns: set[fx.Node] = field(default_factory=set)
    rows: dict[fx.Node, Cut] = field(default_factory=dict)
    origins: dict[fx.Node, Origin] = field(default_factory=dict)
    unknown: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, node: Any) -> Cut | None:
        return self.cut.get(node) if isinstance(node, fx.Node) else None

    def refine(self, cut: Cut, unit: int) -> None:
        """Enlarge the units of a cut's origins to multiples of `unit` elements of the lead."""
        lead = self.origins[cut.lead]
        for origin in (self.origins[o] for o in cut.origins):
            # Products' heads may differ in size. With 16 elements in the lead and 32 in the origin,
            # 2 heads are 32 elements of the lead and 64 of the origin.
            own = unit * origin.head // lead.head if origin.head and lead.head else unit
            origin.unit = math.lcm(origin.unit, own)

    def bound(self, cut: Cut, at: int) -> bool:
        """Make a segment start at the lead's element `at`; return False if an origin is not in `parts`."""
        parts = cut.parts or {(cut.lead, 0)}
        if not cut.origins <= {origin for origin, _ in parts}:
            return False
        for origin, offset in parts:
            if 0 < at + offset < width(origin):
                self.origins[origin].bounds.add(at + offset)
        return True

    def inner_bounds(self, cut: Cut) -> list[int]:
        return sorted(b for b in self.origins[cut.lead].bounds if cut.start < b < cut.start + cut.length)

    def join(self, cuts: Sequence[Cut]) -> Cut | None:
        """Return the first cut with all cuts' origins and bounds, or None if `bound` fails."""
        first = cuts[0]
        # Gate is elements 0-63 of A, and up elements 64-127 of B: element i of A corresponds to i +
        # 64 of B, so parts = {(A, 0), (B, 64)}.
        parts = {(o, offset + c.start - first.start) for c in cuts for o, offset in c.parts or {(c.lead, 0)}}
        joined = replace(first, origins=frozenset().union(*(c.origins for c in cuts)), parts=frozenset(parts))
        bounds = {b - c.start for c in cuts for b in self.inner_bounds(c)}
        return joined if all(self.bound(joined, first.start + b) for b in bounds) else None

    def unit(self, cut: Cut) -> int:
        """Return the size of a value's unit, in elements of its lead."""
        lead = self.origins[cut.lead]
        units = [
            origin.unit * lead.head // origin.head if origin.head and lead.head else origin.unit
            for origin in (self.origins[o] for o in cut.origins)
        ]
        return math.lcm(*units)


def width(node: fx.Node) -> int:
    """Return the size of the dimension that a column-parallel product or embedding shards."""
    return int(shape(operands(node)[0])[0] if node.target is aten.embedding.default else shape(node)[-1])

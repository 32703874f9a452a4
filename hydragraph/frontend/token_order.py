"""In which order the rows of a value stand for tokens: what sends tokens to experts permutes them, and puts them back.

Each row of a value that has tokens is computed from one token. Orders, for 3 tokens a b c with 2 experts each:

    a b c           1          a row for each token
    a a b b c c     2          so many for each, as [T, 2] is flattened
    b a c a c b     a sort     as sorting some value of the rows above orders them, such as the chosen experts

An operator that keeps rows apart does so in every order; where several values meet, their orders must be one. What sort
and arange return says where rows stand (`Points`), and may only choose rows by it: as data it would tell one token of
the others. How many rows have each of the sorted values (`histc`) may only say where an expert's rows end.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.operator_rules import VIEWS
from hydragraph.private.tracing import multiple_of, symbol_name

aten = torch.ops.aten

# How many rows there are for each token, in the tokens' order; or the node that sorted them.
Order = int | fx.Node


class Rows(NamedTuple):
    """Along which dimension of a value tokens stand, and in which order."""

    dim: int
    order: Order


class Points(NamedTuple):
    """An index [rows]: its rows are in the order `along`; each names the row of one token in the order `to`."""

    along: Order
    to: Order


SAME = frozenset(
    {
        *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default),
        *(aten.contiguous.default, aten.lift_fresh_copy.default, aten.to.dtype_layout, aten.to.device),
    }
)
_SORTS = frozenset({aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable})
ARANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
# Operators whose second result are places along a dimension.
_CHOICES = frozenset({aten.topk.default, aten.max.dim, aten.sort.default, aten.sort.stable})
_CHOSEN = frozenset({aten.argmax.default, aten.argsort.default, aten.argsort.stable})
_QUOTIENTS = frozenset({aten.floor_divide.default, aten.div.Tensor_mode})
_GROUPED = ("aten._grouped_mm.default", "aten.grouped_mm.default", "transformers.grouped_mm_fallback.default")


class Routing:
    """Follows what sends rows elsewhere; `rows` is what `mixing` knows of each value, and is added to."""

    def __init__(self, rows: dict[fx.Node, Rows], tokens: str) -> None:
        self._rows = rows
        self._tokens = tokens
        self._points: dict[fx.Node, Points] = {}
        # What is noted of values: 0, 1, 2, ... through the rows of an order;
        self._counters: dict[fx.Node, Order] = {}
        # the values by which rows were sorted, in the sorted order -> the sort;
        self._sorted: dict[fx.Node, fx.Node] = {}
        # how many rows have each of these values -> the sort;
        self._counts: dict[fx.Node, fx.Node] = {}
        # the row after the last one that has each of these values -> the sort.
        self._ends: dict[fx.Node, fx.Node] = {}

    def follow(self, node: fx.Node) -> bool:
        """Say whether a node is one of those that route, and note what it gives."""
        target = node.target
        if target in SAME:
            return self._same(node)
        if target is operator.getitem:
            return self._part_of_sort(node)
        if target in _SORTS:
            return self._sort(node)
        if target in ARANGES:
            return self._arange(node)
        if target in _QUOTIENTS:
            return self._quotient(node)
        if target in (aten.index_put.default, aten.scatter.src):
            return self._inverse(node)
        if target in (aten.index.Tensor, aten.index_select.default):
            return self._chosen(node)
        if target is aten.repeat_interleave.self_int:
            return self._repeated(node)
        if target is aten.index_add.default:
            return self._summed(node)
        if target is aten.histc.default:
            return self._count(node)
        if target is aten.cumsum.default and self._first(node) in self._counts:
            self._ends[node] = self._counts[self._first(node)]
            return True
        return str(target) in _GROUPED and self._grouped(node)

    def tells(self, node: fx.Node) -> bool:
        """Say whether a value tells where other tokens stand, or how many there are of a kind."""
        return any(node in notes for notes in (self._points, self._counters, self._counts, self._ends))

    def _first(self, node: fx.Node) -> Any:
        return operands(node)[0]

    def _flat(self, value: Any) -> Order | None:
        """Return the order of the rows of a vector; None: it has none."""
        rows = self._rows.get(value) if isinstance(value, fx.Node) else None
        return rows.order if rows is not None and len(shape(value)) == 1 else None

    def _same(self, node: fx.Node) -> bool:
        """Carry on what is known of a value to its copy in another dtype."""
        first = self._first(node)
        kinds_of_notes: tuple[dict[fx.Node, Any], ...] = (self._points, self._counters, self._counts, self._ends)
        for notes in kinds_of_notes:
            if first in notes:
                notes[node] = notes[first]
                return True
        # A sorted value is copied as any other is; besides, the copy is sorted, too.
        if first in self._sorted:
            self._sorted[node] = self._sorted[first]
        return False

    def _sort(self, node: fx.Node) -> bool:
        """Sort rows by a value; or by where they stand, which turns the order round."""
        first = self._first(node)
        if self._is_permutation(first) and isinstance(value_of(node), torch.Tensor) and _ascends(node):
            along, to = self._points[first]
            self._points[node] = Points(to, along)
            return True
        order = self._flat(first)
        if order is not None and isinstance(value_of(node), torch.Tensor):  # argsort
            self._points[node] = Points(node, order)
        return order is not None

    def _part_of_sort(self, node: fx.Node) -> bool:
        sort, part = operands(node)
        order = self._flat(self._first(sort)) if isinstance(sort, fx.Node) and sort.target in _SORTS else None
        if order is None:
            return False
        if part == 1:
            self._points[node] = Points(sort, order)
        else:
            self._rows[node] = Rows(0, sort)
            self._sorted[node] = sort
        return True

    def _is_permutation(self, value: Any) -> bool:
        """Say whether an index points to each row of an order of so many for each token, once."""
        points = self._points.get(value)
        return points is not None and multiple_of(shape(value)[0], self._tokens) == points.to

    def _arange(self, node: fx.Node) -> bool:
        times = multiple_of(shape(node)[0], self._tokens)
        start = ([0, *operands(node)] if node.target is aten.arange.default else operands(node))[0]
        step = 1
        if node.target is aten.arange.start_step and len(operands(node)) > 2:
            step = operands(node)[2]
        if times is None or start != 0 or step != 1:
            return False
        self._counters[node] = times
        return True

    def _quotient(self, node: fx.Node) -> bool:
        """Divide where a row stands by how many there are for each token, or for each group of these."""
        first, by = operands(node)[:2]
        floors = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
        along, to = self._points.get(first, (None, None))
        if along is None or not floors or type(by) is not int or type(to) is not int or by < 1 or to % by:
            return False
        self._points[node] = Points(along, to // by)
        return True

    def _inverse(self, node: fx.Node) -> bool:
        """Turn an order round: what is put at the place of each row is the number of the row."""
        index: Any = None
        if node.target is aten.index_put.default:
            _, indices, values, *more = operands(node)
            index = indices[0] if len(indices) == 1 and not any(more) else None
        else:
            _, dim, place, values = operands(node)
            index = place if dim == 0 else None
        if not self._is_permutation(index) or self._counters.get(values) != self._points[index].to:
            return False
        along, to = self._points[index]
        self._points[node] = Points(to, along)
        return True

    def _chosen(self, node: fx.Node) -> bool:
        """Take the rows that an index points to."""
        first, *rest = operands(node)
        if node.target is aten.index_select.default:
            dim, index = rest
        else:
            chosen = [(d, i) for d, i in enumerate(rest[0]) if i is not None]
            if len(chosen) != 1:
                return False
            dim, index = chosen[0]
        points = self._points.get(index)
        rows = self._rows.get(first)
        if points is None or rows != Rows(dim % len(shape(first)), points.to):
            return False
        self._rows[node] = Rows(rows.dim, points.along)
        if isinstance(points.along, fx.Node) and self._first(points.along) is first:
            self._sorted[node] = points.along
        return True

    def _repeated(self, node: fx.Node) -> bool:
        """Repeat each row."""
        first, times, *rest = operands(node)
        repeated = self._rows.get(first)
        dim = rest[0] if rest else node.kwargs.get("dim")
        if repeated is None or type(repeated.order) is not int or type(times) is not int or type(dim) is not int:
            return False
        if dim % len(shape(first)) != repeated.dim:
            return False
        self._rows[node] = Rows(repeated.dim, repeated.order * times)
        return True

    def _summed(self, node: fx.Node) -> bool:
        """Add rows to those that they point to."""
        into, dim, index, rows = operands(node)
        points = self._points.get(index)
        if points is None or self._rows.get(rows) != Rows(dim, points.along):
            return False
        if self._rows.get(into, Rows(dim, points.to)) != Rows(dim, points.to):
            return False
        if multiple_of(shape(node)[dim], self._tokens) != points.to:
            return False
        self._rows[node] = Rows(dim, points.to)
        return True

    def _count(self, node: fx.Node) -> bool:
        """Count how many rows have each of the numbers 0, 1, 2, ..."""
        named: dict[str, Any] = dict(zip(("input", "bins", "min", "max"), operands(node), strict=False))
        options = {"bins": 100, "min": 0, "max": 0, **named, **node.kwargs}
        sort = self._sorted.get(options["input"])
        if sort is None or options["min"] != 0 or options["max"] != options["bins"] - 1:
            return False
        if not _ascends(sort) or not _is_choice(self._first(sort)):
            return False
        self._counts[node] = sort
        return True

    def _grouped(self, node: fx.Node) -> bool:
        """Multiply the rows of each expert, which stand together, with its weight."""
        arguments: list[Any] = [*operands(node), *node.kwargs.values()]
        first, weight, *rest = arguments
        ends = [self._ends[argument] for argument in rest if isinstance(argument, fx.Node) and argument in self._ends]
        others = [argument for argument in rest if isinstance(argument, fx.Node) and argument not in self._ends]
        if len(ends) != 1 or others or weight in self._rows or self.tells(weight):
            return False
        if self._rows.get(first) != Rows(0, ends[0]):
            return False
        self._rows[node] = Rows(0, ends[0])
        return True


def _ascends(sort: fx.Node) -> bool:
    """Say whether an operator that sorts puts the least first."""
    at = 3 if "stable" in str(sort.target) else 2
    arguments = operands(sort)
    return not (arguments[at] if len(arguments) > at else sort.kwargs.get("descending", False))


def _is_choice(value: Any) -> bool:
    """Say whether a value holds places along a dimension, which are never negative: which experts were chosen."""
    while isinstance(value, fx.Node) and value.target in SAME | VIEWS:
        value = operands(value)[0]
    if not isinstance(value, fx.Node):
        return False
    if value.target is operator.getitem:
        chooser, part = operands(value)
        return part == 1 and chooser.target in _CHOICES
    return value.target in _CHOSEN


def viewed(node: fx.Node, rows: Mapping[fx.Node, Rows], dim: int, tokens: str) -> Rows | None:
    """Return the rows of a reshaped value: with as many elements before the tokens as it had; None: they are torn up.

    Args:
        dim: of the result, whose size has to do with the number of tokens.
    """
    first = operands(node)[0]
    rows_before = rows[first]
    before = shape(first)
    after = shape(node)
    if _elements(before[: rows_before.dim]) != _elements(after[:dim]):
        return None
    here = multiple_of(before[rows_before.dim], tokens)
    there = multiple_of(after[dim], tokens)
    if here is not None and here == there:
        return Rows(dim, rows_before.order)
    if here is None or there is None or type(rows_before.order) is not int or _elements(before[: rows_before.dim]) != 1:
        return None
    # [T, 2, H] as [2T, H]: the rows of one token are parted, or joined again, and stay together.
    return Rows(dim, there)


def _elements(sizes: Any) -> int | None:
    """Return how many elements have these sizes; None: that depends on the batch."""
    return None if any(symbol_name(size) is not None for size in sizes) else math.prod(map(int, sizes))

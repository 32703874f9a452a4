"""Tracking of token order through expert routing, which permutes tokens and restores their order.

Orders of 3 tokens a b c with 2 experts each:

    a b c           1                  one row per token
    a a b b c c     2                  two rows for each token, as in a flattened [T, 2]
    a b c a b c     RepeatedTokens(2)  all tokens twice, as in a flattened [2, T]
    b a c a c b     a sort             rows of an order above, sorted by a value such as the chosen expert

An operator that keeps rows separate keeps tokens separate if its operands share one order. Positions of rows
(`RowPointers`) depend on other tokens, so they may only be indices. Counts of rows per sort key (`histc`) may only
determine where experts' rows end.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.passes.graph_node import is_grouped, operands, shape
from hydragraph.passes.operator_rules import VIEWS
from hydragraph.private.operator_schemas import argument_of, aten_operators
from hydragraph.private.tracing import multiple_of, symbol_name

aten = torch.ops.aten


@dataclass(frozen=True)
class RepeatedTokens:
    """Order of rows that repeats all tokens `number` times."""

    number: int


Order = int | RepeatedTokens | fx.Node


class TokenRows(NamedTuple):
    dim: int
    order: Order


class RowPointers(NamedTuple):
    """Index tensor with entries in the order `along`, which point to rows in the order `to`."""

    along: Order
    to: Order


class Counter(NamedTuple):
    """Tensor 0, 1, 2, ..., with one number per row of an order."""

    order: Order


class Counts(NamedTuple):
    """Number of rows per sort key or, if `ends`, the index after each key's last row."""

    sort: fx.Node
    ends: bool


# Result of a routing operator, or None for other operators.
Followed = TokenRows | RowPointers | Counter | Counts | None

SAME = aten_operators("to.dtype to.dtype_layout to.device _to_copy clone detach contiguous lift_fresh_copy")
_SORTS = aten_operators("sort sort.stable argsort argsort.stable")
ARANGES = aten_operators("arange arange.start arange.start_step")
# The second result contains indices.
_CHOICES = aten_operators("topk max.dim sort sort.stable")
_CHOSEN = aten_operators("argmax argsort argsort.stable")
_QUOTIENTS = aten_operators("floor_divide div.Tensor_mode")


class RoutingTracker:
    """Tracker that adds the results of routing operators to the `rows` of `mixing`."""

    def __init__(self, rows: dict[fx.Node, TokenRows], tokens: str) -> None:
        self._rows = rows
        self._tokens = tokens
        # Values that depend on other tokens
        self._telling: dict[fx.Node, RowPointers | Counter | Counts] = {}
        # Sorted keys of rows -> the operator that sorted them
        self._sorted: dict[fx.Node, fx.Node] = {}
        self._handlers: tuple[tuple[Collection[Any], Callable[[fx.Node], Followed]], ...] = (
            (SAME, self._same),
            ({operator.getitem}, self._part_of_sort),
            (_SORTS, self._sort),
            (ARANGES, self._arange),
            (_QUOTIENTS, self._quotient),
            ({aten.index_put.default, aten.scatter.src}, self._inverse),
            ({aten.index.Tensor, aten.index_select.default}, self._chosen),
            ({aten.repeat_interleave.self_int}, self._repeated),
            ({aten.repeat.default}, self._copied),
            ({aten.index_add.default}, self._summed),
            ({aten.histc.default}, self._count),
            ({aten.cumsum.default}, self._end),
        )

    def follow(self, node: fx.Node) -> bool:
        """Record a routing node's result; return False for other nodes."""
        by_rows = self._grouped if is_grouped(node) else None
        handler = next((handler for targets, handler in self._handlers if node.target in targets), by_rows)
        result = None if handler is None else handler(node)
        if isinstance(result, TokenRows):
            self._rows[node] = result
        elif result is not None:
            self._telling[node] = result
        return result is not None

    def tells(self, node: fx.Node) -> bool:
        """Return whether a value reveals positions or counts of other tokens."""
        return node in self._telling

    def _points(self, value: Any) -> RowPointers | None:
        points = self._telling.get(value)
        return points if isinstance(points, RowPointers) else None

    def _permutation(self, value: Any) -> RowPointers | None:
        points = self._points(value)
        # A permutation has an entry for each row that it points to.
        whole = points is not None and multiple_of(shape(value)[0], self._tokens) == points.to
        return points if whole else None

    def _flat(self, value: Any) -> Order | None:
        rows = self._rows.get(value) if isinstance(value, fx.Node) else None
        return rows.order if rows is not None and len(shape(value)) == 1 else None

    def _same(self, node: fx.Node) -> Followed:
        first = operands(node)[0]
        if first in self._sorted:
            self._sorted[node] = self._sorted[first]
        return self._telling.get(first)

    def _sort(self, node: fx.Node) -> Followed:
        first = operands(node)[0]
        points = self._permutation(first)
        # argsort inverts a permutation.
        if points is not None and isinstance(value_of(node), torch.Tensor) and _ascends(node):
            return RowPointers(points.to, points.along)
        order = self._flat(first)
        return None if order is None else RowPointers(node, order)

    def _part_of_sort(self, node: fx.Node) -> Followed:
        sort, part = operands(node)
        order = self._flat(operands(sort)[0]) if isinstance(sort, fx.Node) and sort.target in _SORTS else None
        if order is None:
            return None
        # sort returns values and indices.
        if part == 1:
            return RowPointers(sort, order)
        self._sorted[node] = sort
        return TokenRows(0, sort)

    def _arange(self, node: fx.Node) -> Followed:
        times = multiple_of(shape(node)[0], self._tokens)
        return Counter(times) if times is not None and counts_up(node) else None

    def _quotient(self, node: fx.Node) -> Followed:
        """Handle `positions // n`, where n divides the rows per token."""
        first, by = operands(node)[:2]
        floors = node.target is aten.floor_divide.default or argument_of(node, "rounding_mode") == "floor"
        along, to = self._points(first) or (None, None)
        if along is None or not floors or type(by) is not int or type(to) is not int or by < 1 or to % by:
            return None
        # With 2 rows per token, rows 0 to 5, divided by 2, are tokens 0 0 1 1 2 2.
        return RowPointers(along, to // by)

    def _inverse(self, node: fx.Node) -> Followed:
        """Handle the inversion of a permutation, which writes 0, 1, 2, ... at its entries."""
        index: Any
        if node.target is aten.index_put.default:
            _, indices, values = operands(node)[:3]
            index = indices[0] if len(indices) == 1 and not argument_of(node, "accumulate") else None
        else:
            _, dim, place, values = operands(node)
            index = place if dim == 0 else None
        points = self._permutation(index)
        if points is None or self._telling.get(values) != Counter(points.to):
            return None
        return RowPointers(points.to, points.along)

    def _chosen(self, node: fx.Node) -> Followed:
        first, *rest = operands(node)
        if node.target is aten.index_select.default:
            dim, index = rest
        else:
            chosen = [(d, i) for d, i in enumerate(rest[0]) if i is not None]
            if len(chosen) != 1:
                return None
            dim, index = chosen[0]
        points = self._points(index)
        rows = self._rows.get(first)
        if points is None or rows != TokenRows(dim % len(shape(first)), points.to):
            return None
        # Indexing a sort's operand by the sort gives the sorted keys.
        if isinstance(points.along, fx.Node) and operands(points.along)[0] is first:
            self._sorted[node] = points.along
        return TokenRows(rows.dim, points.along)

    def _repeated(self, node: fx.Node) -> Followed:
        first, times = operands(node)[:2]
        repeated = self._rows.get(first)
        dim = argument_of(node, "dim")
        if repeated is None or type(repeated.order) is not int or type(times) is not int or type(dim) is not int:
            return None
        return TokenRows(repeated.dim, repeated.order * times) if dim % len(shape(first)) == repeated.dim else None

    def _copied(self, node: fx.Node) -> Followed:
        first, times = operands(node)
        rows = self._rows.get(first)
        if rows is None or rows.order != 1 or len(times) != len(shape(first)):
            return None
        number = times[rows.dim]
        return TokenRows(rows.dim, RepeatedTokens(number)) if type(number) is int and number != 1 else None

    def _summed(self, node: fx.Node) -> Followed:
        into, dim, index, rows = operands(node)
        points = self._points(index)
        if points is None or self._rows.get(rows) != TokenRows(dim, points.along):
            return None
        # index_add returns rows to the order `to`, which `into` must have.
        result = TokenRows(dim, points.to)
        fits = self._rows.get(into, result) == result and multiple_of(shape(node)[dim], self._tokens) == points.to
        return result if fits else None

    def _count(self, node: fx.Node) -> Followed:
        sort = self._sorted.get(operands(node)[0])
        if sort is None or not _ascends(sort) or not _is_choice(operands(sort)[0]):
            return None
        # One bin per key: with min 0 and max bins - 1, histc counts keys 0 to bins - 1 separately.
        whole = argument_of(node, "min") == 0 and argument_of(node, "max") == argument_of(node, "bins") - 1
        return Counts(sort, ends=False) if whole else None

    def _end(self, node: fx.Node) -> Followed:
        counts = self._telling.get(operands(node)[0])
        return Counts(counts.sort, ends=True) if isinstance(counts, Counts) and not counts.ends else None

    def _grouped(self, node: fx.Node) -> Followed:
        first, weight, *_ = operands(node)
        others = [self._telling.get(argument) for argument in node.all_input_nodes if argument not in (first, weight)]
        ends = others[0] if len(others) == 1 else None
        if not isinstance(ends, Counts) or not ends.ends or weight in self._rows or self.tells(weight):
            return None
        # The ends separate experts only if the same sort ordered the rows.
        result = TokenRows(0, ends.sort)
        return result if self._rows.get(first) == result else None


def counts_up(arange: fx.Node) -> bool:
    return (argument_of(arange, "start") or 0) == 0 and (argument_of(arange, "step") or 1) == 1


def _ascends(sort: fx.Node) -> bool:
    return not argument_of(sort, "descending")


def _is_choice(value: Any) -> bool:
    while isinstance(value, fx.Node) and value.target in SAME | VIEWS:
        value = operands(value)[0]
    if not isinstance(value, fx.Node):
        return False
    if value.target is operator.getitem:
        chooser, part = operands(value)
        return part == 1 and chooser.target in _CHOICES
    return value.target in _CHOSEN


def viewed(node: fx.Node, rows: Mapping[fx.Node, TokenRows], dim: int, tokens: str) -> TokenRows | None:
    """Return a reshaped value's `TokenRows`, or None if the reshape splits tokens.

    Args:
        dim: token dimension of the result.
    """
    first = operands(node)[0]
    rows_before = rows[first]
    before = shape(first)
    after = shape(node)
    # here, there: rows per token before and after, e.g. 1 and 2 for [T, 2, H] to [2T, H].
    # above, now_above: elements in the dimensions before the token dimension.
    here = multiple_of(before[rows_before.dim], tokens)
    there = multiple_of(after[dim], tokens)
    above, now_above = _elements(before[: rows_before.dim]), _elements(after[:dim])
    # [E, T, H] to [E * T, H], or back
    if above != now_above:
        copies = (here, there, rows_before.order)
        if copies == (1, above, 1) and now_above == 1 and type(above) is int:
            return TokenRows(dim, RepeatedTokens(above))
        return TokenRows(dim, 1) if copies == (now_above, 1, RepeatedTokens(now_above or 0)) and above == 1 else None
    if here is not None and here == there:
        return TokenRows(dim, rows_before.order)
    if here is None or there is None or type(rows_before.order) is not int or above != 1:
        return None
    # [T, 2, H] to [2T, H]: a token's rows stay adjacent.
    return TokenRows(dim, there)


def _elements(sizes: Any) -> int | None:
    return None if any(symbol_name(size) is not None for size in sizes) else math.prod(map(int, sizes))

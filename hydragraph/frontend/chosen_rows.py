"""Rewriting of graphs, to process all rows instead of those selected by a mask.

A model may select an expert's tokens with a mask:

    rows = torch.where(choice == e)[0]           # or x[mask], nonzero(), one_hot(...)
    y = y.index_add(0, rows, expert(x[rows]))

A captured graph's sizes cannot depend on tensor values, so `with_all_rows` rewrites this as:

    y = y + torch.where(choice == e, expert(x), 0)

Both give equal results if each row depends on only one token, which `token_axes` proves, and if unselected rows have
finite gradients.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.frontend.token_axes import computed_alike, symbolic_dims
from hydragraph.frontend.token_order import SAME
from hydragraph.ir.graph_data import value_of
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.operator_rules import VIEWS
from hydragraph.private.module_internals import graph_module
from hydragraph.private.operator_schemas import argument_of, aten_operators
from hydragraph.private.tracing import fake_mode_of, is_counted, symbol_name, symbols_in

_LOG = logging.getLogger(__name__)

aten = torch.ops.aten

_PLACES = aten_operators("where nonzero_numpy")
_FLATTENED = VIEWS | aten_operators("squeeze squeeze.dim")


class _Unchanged(Exception):  # noqa: N818
    pass


@dataclass(frozen=True)
class _Selection:
    """Mask over tokens, or over tokens and their experts.

    Attributes:
        mask: the mask, with the token dimension first.
        dims: for each dimension of `mask`, its index in the original mask.
    """

    mask: fx.Node
    dims: tuple[int, ...]
    sizes: tuple[Any, ...]


def with_all_rows(graph: fx.GraphModule, where: str) -> fx.GraphModule:
    """Return a graph without row selections, or the given graph if one is unsupported."""
    if not any(_selects(node) for node in graph.graph.nodes):
        return graph
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    copied = graph_module(graph, nodes)
    try:
        _Rewriting(copied).run()
    except _Unchanged as reason:
        _LOG.info("%s: row selection by a mask was not replaced: %s", where, reason)
        return graph
    copied.graph.eliminate_dead_code()
    copied.recompile()
    _LOG.warning(
        "%s: the block processes all tokens instead of only those that a mask selects, so n experts cost as much as n "
        "dense layers; to compute only chosen experts, use an MoE model of transformers (Mixtral, Qwen3-MoE)",
        where,
    )
    return copied


def _selects(node: fx.Node) -> bool:
    if node.target in _PLACES or node.target is aten.nonzero.default:
        return True
    return node.target in (aten.index.Tensor, aten.index_put.default) and _mask_of(operands(node)[1]) is not None


def _mask_of(indices: Sequence[fx.Node | None]) -> fx.Node | None:
    only = indices[0] if len(indices) == 1 else None
    return only if only is not None and value_of(only).dtype is torch.bool else None


class _Rewriting:
    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph.graph
        self._mode = fake_mode_of([value_of(n) for n in self._graph.nodes])
        self._selections: dict[fx.Node, _Selection] = {}  # by mask
        self._lists: dict[fx.Node, _Selection] = {}
        self._indices: dict[fx.Node, tuple[_Selection, int]] = {}
        self._rows: dict[fx.Node, _Selection] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "output" and any(self._is_selected(n) for n in node.all_input_nodes):
                raise _Unchanged("the block returns the selected rows")
            if node.op == "call_function":
                self._visit(node)

    def _is_selected(self, node: fx.Node) -> bool:
        return node in self._rows or node in self._indices or node in self._lists

    def _visit(self, node: fx.Node) -> None:
        target = node.target
        arguments = operands(node)
        if target in _PLACES or target is aten.nonzero.default:
            self._lists[node] = self._selection(arguments[0], node)
        elif arguments and arguments[0] in self._lists:
            self._indices[node] = self._lists[arguments[0]], self._dimension(node)
        elif target in SAME and arguments[0] in self._indices:
            self._indices[node] = self._indices[arguments[0]]
        elif (chosen := self._choice(node)) is None:
            self._follow(node)
        elif target in (aten.index.Tensor, aten.index_select.default):
            self._replace(node, self._taken(node, arguments[0], *chosen), chosen[0])
        elif argument_of(node, "alpha") not in (None, 1):
            raise _Unchanged("index_add has an alpha other than 1")
        else:
            values = arguments[2 if target is aten.index_put.default else 3]
            adds = target is aten.index_add.default or bool(argument_of(node, "accumulate"))
            self._put(node, arguments[0], chosen, values, adds)

    def _choice(self, node: fx.Node) -> tuple[_Selection, dict[int, int]] | None:
        arguments = operands(node)
        if node.target in (aten.index.Tensor, aten.index_put.default):
            indices = arguments[1]
            if _mask_of(indices) is not None or any(index in self._indices for index in indices):
                return self._chosen(indices, node)
        by_index = (aten.index_select.default, aten.index_add.default, aten.index_copy.default)
        if node.target in by_index and arguments[2] in self._indices:
            selection, along = self._indices[arguments[2]]
            return selection, {along: arguments[1] % len(shape(arguments[0]))}
        return None

    def _selection(self, mask: fx.Node, place: fx.Node) -> _Selection:
        equal_mask = next((earlier for earlier in self._selections if computed_alike(earlier, mask)), None)
        if equal_mask is not None:
            return self._selections[equal_mask]
        if self._is_selected(mask):
            raise _Unchanged("rows are selected from selected rows")
        sizes = shape(mask)
        tokens = symbolic_dims(mask)
        if len(tokens) != 1:
            raise _Unchanged("the mask does not have exactly one token dimension")
        # A mask [E, T] has the order (1, 0): it is permuted to [T, E].
        order = (*tokens, *(d for d in range(len(sizes)) if d not in tokens))
        chosen = mask if value_of(mask).dtype is torch.bool else self._call(place, aten.ne.Scalar, mask, 0)
        if order != tuple(range(len(sizes))):
            chosen = self._call(place, aten.permute.default, chosen, list(order))
        selection = self._selections[mask] = _Selection(chosen, order, tuple(sizes[d] for d in order))
        return selection

    def _dimension(self, node: fx.Node) -> int:
        listed = operands(node)[0]
        dims = len(self._lists[listed].dims)
        if node.target is operator.getitem and listed.target in _PLACES:
            return int(operands(node)[1])
        if listed.target is aten.nonzero.default:
            if node.target is aten.select.int and operands(node)[1] in (1, -1):
                return int(operands(node)[2]) % dims
            if dims == 1 and len(shape(node)) == 1 and node.target in _FLATTENED:
                return 0
        raise _Unchanged(f"{node.target} reads positions that a mask selects")

    def _chosen(self, indices: Sequence[fx.Node | None], place: fx.Node) -> tuple[_Selection, dict[int, int]]:
        mask = _mask_of(indices)
        # Result: selection, and dimension of its mask -> dimension of the indexed value.
        if mask is not None:
            return self._selection(mask, place), {d: d for d in range(len(shape(mask)))}
        indexed_dims = [(at, index) for at, index in enumerate(indices) if index is not None]
        if any(index not in self._indices for _, index in indexed_dims):
            raise _Unchanged("positions that a mask selects are combined with another index")
        # x[rows, :, experts] would move the indexed dimensions to the front, so only indices of
        # adjacent dimensions are rewritten.
        selections = {id(self._indices[index][0]): self._indices[index][0] for _, index in indexed_dims}
        dims = {self._indices[index][1]: at for at, index in indexed_dims}
        places = sorted(dims.values())
        adjacent = places == list(range(places[0], places[0] + len(places)))
        if len(selections) > 1 or len(dims) != len(indexed_dims) or not adjacent:
            raise _Unchanged("the indices come from several masks, or the indexed dimensions are not adjacent")
        return next(iter(selections.values())), dims

    def _taken(self, place: fx.Node, x: fx.Node, selection: _Selection, dims: dict[int, int]) -> fx.Node:
        self._check_sizes(x, selection, dims)
        position = min(dims.values())
        rest = [d for d in range(len(shape(x))) if d not in dims.values()]
        # x [T, H], indexed by a mask [T, E]: first [T, E, H], then [T * E, H].
        front = [dims[d] for d in selection.dims if d in dims]
        result = self._permuted(place, x, [*front, *rest])
        for at, d in enumerate(selection.dims):
            if d not in dims:
                result = self._call(place, aten.unsqueeze.default, result, at)
        if dims.keys() != set(selection.dims):
            sizes = [self._size(place, n) for n in selection.sizes]
            result = self._call(place, aten.expand.default, result, [*sizes, *[-1] * len(rest)])
        if len(selection.dims) > 1:
            kept = [self._size(place, shape(x)[d]) for d in rest]
            result = self._call(place, aten.reshape.default, result, [-1, *kept])
        # PyTorch puts selected rows at the first indexed dimension.
        order = [*range(1, position + 1), 0, *range(position + 1, len(rest) + 1)]
        result = self._permuted(place, result, order)
        # Do not mark `x` itself as selected rows
        if result is x:
            result = self._call(place, aten.permute.default, x, list(range(len(order))))
        return result

    def _put(
        self, node: fx.Node, into: fx.Node, chosen: tuple[_Selection, dict[int, int]], values: fx.Node, adds: bool
    ) -> None:
        selection, dims = chosen
        self._check_sizes(into, selection, dims)
        # A mask with more dimensions than are indexed may select a row several times.
        several = {d for d, size in zip(selection.dims, selection.sizes, strict=True) if not _equal(size, 1)}
        if several - dims.keys() and not adds:
            raise _Unchanged("one row may be written several times")
        # position: dimension of the selected rows in `values`. back: inverse of [*front, *rest].
        position = min(dims.values())
        rest = [d for d in range(len(shape(into))) if d not in dims.values()]
        width = len(shape(values))
        # equal: every row gets the same values, as in x[mask] = 0.
        equal = self._selected_by(values) is None and width <= len(rest) and not (position or adds)
        if not equal and (self._rows.get(values) is not selection or width != len(rest) + 1):
            raise _Unchanged("rows are written at the positions of another mask, or are broadcast")
        front = [dims[d] for d in selection.dims if d in dims]
        back = [[*front, *rest].index(d) for d in range(len(shape(into)))]
        mask = selection.mask
        for _ in rest:
            mask = self._call(node, aten.unsqueeze.default, mask, -1)
        rows = values
        if not equal:
            rows = self._permuted(node, values, [position, *(d for d in range(width) if d != position)])
            if len(selection.dims) > 1:
                sizes = [self._size(node, n) for n in (*selection.sizes, *(shape(into)[d] for d in rest))]
                rows = self._call(node, aten.reshape.default, rows, sizes)
        if adds:
            rows = self._call(node, aten.where.ScalarOther, mask, rows, 0)
            # Add up one token's values from several experts, along dimensions that are not indexed.
            absent = [at for at, d in enumerate(selection.dims) if d not in dims]
            if absent:
                rows = self._call(node, aten.sum.dim_IntList, rows, absent)
            result = self._call(node, aten.add.Tensor, into, self._permuted(node, rows, back))
        else:
            rows = values if equal else self._permuted(node, rows, back)
            result = self._call(node, aten.where.self, self._permuted(node, mask, back), rows, into)
        self._replace(node, result, None)

    def _check_sizes(self, x: fx.Node, selection: _Selection, dims: dict[int, int]) -> None:
        sizes = dict(zip(selection.dims, selection.sizes, strict=True))
        if self._is_selected(x) or any(not _equal(shape(x)[at], sizes[d]) for d, at in dims.items()):
            raise _Unchanged("the mask and the value that it indexes differ in size")

    def _follow(self, node: fx.Node) -> None:
        places = [n for n in node.all_input_nodes if n in self._indices or n in self._lists]
        if places and node.target is not aten.sym_size.int:
            raise _Unchanged(f"{node.target} reads positions that a mask selects")
        selections = {id(s): s for n in node.all_input_nodes if (s := self._selected_by(n)) is not None}
        if not selections:
            return
        if len(selections) > 1:
            raise _Unchanged("an operator combines rows that different masks select")
        self._rows[node] = selection = next(iter(selections.values()))
        # The number of selected rows, u0, becomes the mask's size, such as T * E.
        before = value_of(node)
        node.meta = {**node.meta, "val": self._value(node, before)}
        for one, now in zip(_sizes(before), _sizes(value_of(node)), strict=True):
            unbacked = is_counted(one)
            if unbacked and str(one) not in symbols_in(one):
                raise _Unchanged(f"{node.target} joins or splits rows")
            if not _equal(now, math.prod(selection.sizes) if unbacked else one):
                raise _Unchanged(f"the output size of {node.target} does not match the number of rows")

    def _selected_by(self, node: fx.Node) -> _Selection | None:
        if node in self._indices:
            return self._indices[node][0]
        return self._rows.get(node) or self._lists.get(node)

    def _value(self, node: fx.Node, before: Any) -> Any:
        if node.target is aten.sym_size.int and operands(node)[0] in self._indices:
            return math.prod(self._indices[operands(node)[0]][0].sizes)
        target: Any = node.target
        arguments, options = fx.map_arg((node.args, dict(node.kwargs)), value_of)
        if "device" in options and isinstance(before, Tensor):
            options["device"] = before.device
        try:
            with self._mode:
                return target(*arguments, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _Unchanged(f"{node.target} fails on the rows of all tokens ({error})") from error

    def _replace(self, node: fx.Node, result: fx.Node, selection: _Selection | None) -> None:
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)
        if selection is not None:
            self._rows[result] = selection

    def _permuted(self, place: fx.Node, x: fx.Node, order: list[int]) -> fx.Node:
        return x if order == sorted(order) else self._call(place, aten.permute.default, x, order)

    def _size(self, place: fx.Node, size: Any) -> Any:
        if symbol_name(size) is None:
            return int(size)
        for node in self._graph.nodes:
            if node is place:
                break
            value = value_of(node)
            sizes = [*map(str, value.shape)] if isinstance(value, Tensor) and not self._is_selected(node) else []
            if str(size) in sizes:
                return self._call(place, aten.sym_size.int, node, sizes.index(str(size)))
        raise _Unchanged("no earlier tensor has a size that the new operators need")

    def _call(self, place: fx.Node, target: Any, *arguments: Any) -> fx.Node:
        with self._graph.inserting_before(place):
            node = self._graph.call_function(target, arguments)
        with self._mode:
            value = target(*fx.map_arg(arguments, value_of))
        node.meta = {**place.meta, "val": value}
        return node


def _sizes(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [size for part in value for size in _sizes(part)] if isinstance(value, (tuple, list)) else [value]


def _equal(one: Any, other: Any) -> bool:
    return str(one) == str(other)

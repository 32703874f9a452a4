"""Proof that a loss's graph is a sum of independent terms.

The proof sorts values into four kinds:

    constant    the same for every batch
    bounds      computed only from cu_seqlens and positions in the row
    terms       one row for each token, selected token or sequence
    total       a sum of terms

Operators on terms must keep rows separate (`keeps`), or select rows by bounds or a mask. Among bounds, only lengths may
weight terms. Totals may only be scaled or added. An index computed from bounds (`_Bound`) must select rows of the same
sequence.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.frontend.token_axes import (
    COUNTS,
    MADE,
    RESHAPES,
    computed_alike,
    first_tensor,
    keeps,
    sizes_read,
    symbolic_dims,
)
from hydragraph.frontend.token_order import ARANGES, SAME, TokenRows, counts_up, viewed
from hydragraph.ir.graph_data import value_of
from hydragraph.passes.graph_node import dropout, operands, shape
from hydragraph.passes.operator_rules import MOVES, VIEWS, is_pointwise
from hydragraph.private.operator_schemas import argument_of, aten_operators
from hydragraph.private.tracing import is_counted, is_one_less, symbols_in

aten = torch.ops.aten

# Operators that select or sum rows by index, mask or counts.
_TAKES = aten_operators(
    "index.Tensor index_select masked_select index_add scatter_add repeat_interleave.self_Tensor index_put"
)
# Operators that turn positions in the row into indices.
_FINDS = aten_operators("""
    bucketize.Tensor searchsorted.Tensor repeat_interleave.Tensor repeat_interleave.self_Tensor index.Tensor
    index_select diff sub.Tensor cumsum slice.Tensor select.int narrow cat
""")
_OF_NEIGHBOURS = aten_operators("slice.Tensor select.int narrow cat cumsum diff repeat_interleave.Tensor")
_SEARCHES = {aten.bucketize.Tensor: 1, aten.searchsorted.Tensor: 0}
_QUOTIENTS = aten_operators("floor_divide floor_divide.Scalar div.Tensor_mode div.Scalar_mode")
# Represent all positions
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
_WHOLE_ROW = "weights tokens by their position in the packed row; only position_ids and lengths may be weights"
_ACROSS = "computes a term from several tokens or sequences"
_SIZED = "computes with a number of tokens or sequences"
_OTHERS = (
    "may take another sequence's rows; index tokens by cu_seqlens[:-1] or cu_seqlens[1:] - 1, and sequences by "
    "torch.searchsorted(cu_seqlens[1:], torch.arange(T, device=cu_seqlens.device), right=True)"
)
_BEHIND = "processes a sum over tokens; sums may only be scaled or added"

SCALED = aten_operators("div.Tensor div.Scalar mul.Tensor mul.Scalar")
_SUMS = aten_operators("add.Tensor sub.Tensor")
_ADDED = _SUMS | aten_operators("stack cat")
_KEPT = aten_operators("neg clone detach to.dtype _to_copy squeeze squeeze.dims select.int slice.Tensor")
_LINEAR = MOVES | VIEWS | _KEPT | aten_operators("mean mean.dim sum sum.dim_IntList")
_CLASSES = aten_operators("cross_entropy_loss nll_loss_nd nll_loss")
# PyTorch's code for reduction="sum"
_SUM = 2


class _Bound(Enum):
    BOUNDS = auto()  # cu_seqlens
    # Each sequence's first token
    START = auto()
    # The token after each sequence
    END = auto()
    # A token of each sequence
    INSIDE = auto()
    # Tokens before each sequence's end
    BEFORE = auto()
    # Tokens after each sequence's start
    AFTER = auto()
    # Each token's sequence
    OWNER = auto()
    # Each token's sequence, plus 1
    NEXT = auto()
    # 0, 1, 2, ...
    COUNT = auto()
    # Differences of positions
    LENGTH = auto()
    INDEX = auto()  # other values


_PLACES = {_Bound.BOUNDS, _Bound.START, _Bound.END, _Bound.INSIDE, _Bound.BEFORE, _Bound.AFTER}
_IN_SEQUENCE = {_Bound.START, _Bound.INSIDE}


def first_across(nodes: Sequence[fx.Node], bounds: Sequence[fx.Node]) -> str | None:
    """Describe the first operator that prevents a sum of independent terms, or return None.

    Args:
        bounds: the placeholders of cu_seqlens and max_length that the graph uses.
    """
    # from_bounds: value that depends only on the packing -> its kind.
    # totals: sums of terms, which are valid results.
    from_bounds = {n: _Bound.BOUNDS if n.name == "cu_seqlens" else _Bound.INDEX for n in bounds}
    # Row numbers may only select rows. Without bounds or a counted size (rows that a mask selects),
    # they would count the tokens of the packed row.
    selects = bool(bounds) or any(is_counted(size) for n in nodes for size in getattr(value_of(n), "shape", ()))
    totals: set[fx.Node] = set()
    # Prefix sums over rows
    running: set[fx.Node] = set()
    for node in nodes:
        if node.op == "output":
            stray = next((n for n in node.all_input_nodes if n not in totals), None)
            return f"it returns the result of {stray.target}, not a sum over tokens" if stray is not None else None
        if node.op != "call_function" or not isinstance(first_tensor(node), Tensor):
            continue
        inputs = node.all_input_nodes
        if node.target not in ARANGES and sizes_read(node):
            return f"{node.target} {_SIZED}"
        if any(n in totals for n in inputs):
            if any(_has_rows(n) or n in from_bounds for n in inputs) or not stays_a_sum(node, totals):
                return f"{node.target} {_BEHIND}"
            totals.add(node)
        elif node.target in ARANGES and _has_rows(node):
            if not selects:
                return f"{node.target} {COUNTS}"
            from_bounds[node] = _Bound.COUNT if counts_up(node) else _Bound.INDEX
        elif any(n in from_bounds for n in inputs) and not any(_has_rows(n) and n not in from_bounds for n in inputs):
            if node.target not in _FINDS | VIEWS | MOVES and not is_pointwise(node) and _has_rows(node):
                return f"{node.target} {_ACROSS}"
            bound = _of_bounds(node, from_bounds)
            if bound is None:
                return f"{node.target} {_WHOLE_ROW}"
            from_bounds[node] = bound
        elif any(n in running for n in inputs) or _runs_on(node):
            # Prefix sums mix rows; a difference between two bounds is a term again.
            if not _runs(node, running, from_bounds):
                return f"{node.target} {_ACROSS}"
            if not _is_between_bounds(node, from_bounds):
                running.add(node)
        elif any(map(_has_rows, inputs)):
            problem = _of_terms(node, from_bounds, totals)
            if problem is not None:
                return f"{node.target} {problem}"
    return None


def _of_bounds(node: fx.Node, told: Mapping[fx.Node, _Bound]) -> _Bound | None:
    """Return the kind of an operator's result, or None if the operator uses positions as data."""
    first, *others = operands(node)
    # given: kinds of operands that are bounds, e.g. [BOUNDS] for cu_seqlens[1:].
    given = [told[n] for n in node.all_input_nodes if n in told]
    if node.target in _OF_NEIGHBOURS:
        # repeat_interleave((2, 3)) is 0 0 1 1 1: each token's sequence.
        if node.target is aten.repeat_interleave.Tensor and _is_lengths(first, told):
            return _Bound.OWNER
        if given != [_Bound.BOUNDS]:
            return _Bound.INDEX
        if node.target is aten.diff.default and argument_of(node, "n") == 1:
            return _Bound.LENGTH
        # cu_seqlens[:-1] are sequences' starts, cu_seqlens[1:] their ends.
        return (_Bound.END if others[1] else _Bound.START) if _drops_an_end(node) else _Bound.INDEX
    if node.target in _SEARCHES and operands(node)[_SEARCHES[node.target]] in told:
        return _searched(node, told)
    if node.target is aten.repeat_interleave.self_Tensor:
        kind = told.get(first, _Bound.INDEX) if _is_lengths(others[0], told) else _Bound.INDEX
        return _Bound.OWNER if kind is _Bound.COUNT else kind
    # Indexing by each token's sequence keeps the kind: starts[owner] are starts.
    if node.target in (aten.index.Tensor, aten.index_select.default) and set(given) != {_Bound.LENGTH}:
        return told[first] if first in told and given[1:] == [_Bound.OWNER] else _Bound.INDEX
    if set(given) == {_Bound.LENGTH}:
        return _Bound.LENGTH if _has_rows(node) else _Bound.INDEX
    if node.target in SAME or (node.target not in _SEARCHES and not is_pointwise(node)):
        return told.get(first, _Bound.INDEX) if _has_rows(node) and _dtype(node) in _EXACT else _Bound.INDEX
    if node.target in _SEARCHES or node.kwargs:
        return None
    positions = [n for n in operands(node)[:2] if told.get(n, _Bound.LENGTH) is not _Bound.LENGTH]
    if node.target is aten.sub.Tensor and len(given) == 2 and set(given) <= _PLACES:
        return _Bound.LENGTH
    if node.target is aten.add.Tensor or (node.target is aten.sub.Tensor and positions == [first]):
        return _moved(node, told, positions[0]) if len(positions) == 1 else None
    if node.target in (aten.maximum.default, aten.minimum.default):
        if not set(given) <= _PLACES:
            return given[0] if len(set(given)) == 1 else None
        # A place in a sequence bounds the other operand: max(start, end - 8) is inside too.
        sides = _IN_SEQUENCE | {_Bound.BEFORE if node.target is aten.maximum.default else _Bound.AFTER}
        return _Bound.INSIDE if set(given) <= sides and set(given) & _IN_SEQUENCE else _Bound.INDEX
    return given[0] if node.target in (aten.clamp.default, aten.clamp_min.default) and others == [0] else None


def _moved(node: fx.Node, told: Mapping[fx.Node, _Bound], place: fx.Node) -> _Bound:
    # START + length = END, START + length // 2 = INSIDE, START + 1 = AFTER, END - 1 = INSIDE.
    (by,) = (n for n in operands(node)[:2] if n is not place)
    kind, subtracts = told[place], node.target is aten.sub.Tensor
    if kind is _Bound.START and not subtracts and isinstance(by, fx.Node):
        if _is_lengths(by, told):
            return _Bound.END
        divided = by.target in _QUOTIENTS and _is_lengths(operands(by)[0], told)
        return _Bound.INSIDE if divided and isinstance(k := operands(by)[1], int) and k > 1 else _Bound.INDEX
    if not isinstance(by, int) or by < 1:
        return _Bound.INDEX
    if kind is _Bound.NEXT and subtracts and by == 1:
        return _Bound.OWNER
    if kind in (_Bound.END, _Bound.BEFORE) and subtracts:
        return _Bound.INSIDE if kind is _Bound.END and by == 1 else _Bound.BEFORE
    return _Bound.AFTER if kind in (_Bound.START, _Bound.AFTER) and not subtracts else _Bound.INDEX


def _searched(node: Any, told: Mapping[fx.Node, _Bound]) -> _Bound:
    bounds, values = (operands(node)[i] for i in (_SEARCHES[node.target], 1 - _SEARCHES[node.target]))
    searches = node.target is aten.searchsorted.Tensor
    # searchsorted((2, 5), 0..4, right=True) is 0 0 1 1 1: each token's sequence. In all of
    # cu_seqlens (0, 2, 5), the results are 1 1 2 2 2.
    right = argument_of(node, "right") or (searches and argument_of(node, "side") == "right")
    if not right or told.get(values) is not _Bound.COUNT:
        return _Bound.INDEX
    return {_Bound.END: _Bound.OWNER, _Bound.BOUNDS: _Bound.NEXT}.get(told[bounds], _Bound.INDEX)


def _is_lengths(node: Any, told: Mapping[fx.Node, _Bound]) -> bool:
    while node.target in SAME:
        node = operands(node)[0]
    if node.target is aten.diff.default:
        return told.get(node) is _Bound.LENGTH
    return node.target is aten.sub.Tensor and [told.get(n) for n in operands(node)] == [_Bound.END, _Bound.START]


def _drops_an_end(node: fx.Node) -> bool:
    first, *others = operands(node)
    if node.target not in (aten.slice.Tensor, aten.narrow.default) or others[0] != 0 or others[1] not in (0, 1):
        return False
    if node.target is aten.slice.Tensor and others[3:] not in ([], [1]):
        return False
    return len(shape(node)) == 1 and is_one_less(shape(node)[0], shape(first)[0])


def _of_terms(node: fx.Node, told: Mapping[fx.Node, _Bound], totals: set[fx.Node]) -> str | None:
    """Return the problem with an operator on terms, or None; add totals to `totals`."""
    inputs = node.all_input_nodes
    # Reads only sizes
    if node.target in MADE:
        return None
    # rows: operand -> its dimensions with an entry per row; two would pair rows.
    rows = {n: symbolic_dims(n) for n in inputs if _has_rows(n)}
    if any(len(dims) > 1 for dims in rows.values()) or len(symbolic_dims(node)) > 1:
        return _ACROSS
    positions = [n for n in inputs if told.get(n, _Bound.LENGTH) is not _Bound.LENGTH]
    if node.target in _TAKES and operands(node)[0] in rows:
        if any(n is operands(node)[0] or not _is_index(n) for n in positions):
            return _WHOLE_ROW
        dim = rows[operands(node)[0]][0]
        if not _takes_by_bounds(node, dim, told):
            return _ACROSS
        return None if _takes_own_rows(node, dim, told) else _OTHERS
    if positions:
        return _WHOLE_ROW
    row_of = {n: TokenRows(dims[0], 1) for n, dims in rows.items()}
    if sums_rows(node, row_of):
        totals.add(node)
        return None
    if not _has_rows(node):
        return _ACROSS
    first = operands(node)[0]
    (dim,) = symbolic_dims(node)
    if node.target is dropout and not _has_all_tokens(node):
        return _ACROSS
    if node.target in RESHAPES and first in rows:
        (symbol, *_) = symbols_in(shape(first)[rows[first][0]])
        seen = viewed(node, row_of, dim, symbol)
        return None if seen is not None and isinstance(seen.order, int) else _ACROSS
    return None if keeps(node, list(rows), {n: dims[0] for n, dims in rows.items()}, dim) else _ACROSS


def _runs_on(node: fx.Node) -> bool:
    if node.target is not aten.cumsum.default:
        return False
    return symbolic_dims(operands(node)[0]) == [operands(node)[1] % len(value_of(node).shape)]


def _runs(node: fx.Node, running: set[fx.Node], told: Container[fx.Node]) -> bool:
    arguments = operands(node)
    if _runs_on(node):
        return True
    if node.target is aten.sub.Tensor:
        return all(n in running for n in arguments[:2])
    # Prefix sums may start with zeros
    if node.target is aten.cat.default:
        return all(n in running or n.target in MADE for n in node.all_input_nodes)
    if node.target is aten.index.Tensor:
        return _takes_by_bounds(node, symbolic_dims(arguments[0])[0], told) and len(arguments[1]) == 1
    return node.target in VIEWS | MOVES


def _is_between_bounds(node: fx.Node, told: Mapping[fx.Node, _Bound]) -> bool:
    if node.target is not aten.sub.Tensor:
        return False
    first, second = (_indexed(n, told) for n in operands(node)[:2])
    return first is not None and second is not None and computed_alike(first, second)


def _indexed(node: fx.Node, told: Mapping[fx.Node, _Bound]) -> fx.Node | None:
    while node.target in VIEWS | MOVES:
        node = operands(node)[0]
    if node.target is not aten.index.Tensor:
        return None
    source, (index, *_) = operands(node)
    places = _is_index(index) and _has_rows(index) and told.get(index, _Bound.LENGTH) is not _Bound.LENGTH
    return source if places else None


def _takes_by_bounds(node: fx.Node, dim: int, told: Container[fx.Node]) -> bool:
    arguments = operands(node)
    if node.target in (aten.index.Tensor, aten.index_put.default):
        # A mask may index several dimensions.
        places = arguments[1]
        masks = [i for i in places if i is not None and _dtype(i) is torch.bool]
        return bool(masks) or (len(places) > dim and (places[dim] is None or places[dim] in told))
    if node.target is aten.masked_select.default:
        return True
    indices = [n for n in node.all_input_nodes if n is not arguments[0] and _is_index(n)]
    return bool(indices) and all(n in told for n in indices)


def _takes_own_rows(node: fx.Node, dim: int, told: Mapping[fx.Node, _Bound]) -> bool:
    first, *others = operands(node)
    if node.target in (aten.index.Tensor, aten.index_put.default):
        index: Any = others[0][dim] if len(others[0]) > dim else None
    else:
        index = next((n for n in others[-2:] if isinstance(n, fx.Node) and n in told), None)
    if index not in told or _dtype(index) is torch.bool:
        return True
    if told[index] is _Bound.COUNT:
        return str(shape(index)[0]) == str(shape(first)[dim])
    if node.target is aten.repeat_interleave.self_Tensor:
        return _is_lengths(index, told)
    bounds = next((n for n, kind in told.items() if kind is _Bound.BOUNDS), None)
    # If `first` has a row per sequence, the index must name each token's own sequence; if it has a
    # row per token, a token of that sequence.
    of_sequences = bounds is not None and is_one_less(shape(first)[dim], shape(bounds)[0])
    return told[index] is _Bound.OWNER if of_sequences else told[index] in _IN_SEQUENCE


def _is_index(node: fx.Node) -> bool:
    kind = _dtype(node)
    return kind is not None and kind is not torch.bool and not kind.is_floating_point


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(value_of(node), "dtype", None)


def _has_all_tokens(node: fx.Node) -> bool:
    hidden = next(n for n in node.graph.find_nodes(op="placeholder") if n.name == "hidden")
    return len({str(shape(n)[d]) for n in (node, hidden) for d in symbolic_dims(n)}) == 1


def _has_rows(node: fx.Node) -> bool:
    return bool(symbolic_dims(node))


def stays_a_sum(node: fx.Node, summed: Container[fx.Node]) -> bool:
    others = [n for n in node.all_input_nodes if n not in summed]
    if node.target in _ADDED:
        numbers = [a for a in operands(node)[:2] if isinstance(a, int | float) and node.target in _SUMS]
        return not any(numbers) and all(_is_zero(n) for n in others)
    if node.target in SCALED:
        factors = [a for a in operands(node)[:2] if a in summed]
        return len(factors) == 1 and ("mul" in str(node.target) or operands(node)[0] in summed)
    return node.target in _LINEAR


def sums_rows(node: fx.Node, rows: Mapping[fx.Node, TokenRows]) -> bool:
    arguments = operands(node)
    first = arguments[0] if arguments else None
    if not isinstance(first, fx.Node) or first not in rows:
        return False
    dim = rows[first].dim
    if node.target is aten.sum.default:
        return True
    if node.target is aten.sum.dim_IntList:
        named = arguments[1]
        return not named or any(axis % len(shape(first)) == dim for axis in named)
    if node.target in _CLASSES:
        return argument_of(node, "reduction") == _SUM and dim != min(1, len(shape(first)) - 1)
    if argument_of(node, "reduction") == _SUM:
        return all(rows.get(n, rows[first]) == rows[first] for n in node.all_input_nodes)
    return node.target is aten.dot.default and all(n in rows for n in node.all_input_nodes)


def _is_zero(node: fx.Node) -> bool:
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        return bool(operands(node)[-1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)

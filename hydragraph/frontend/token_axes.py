"""Allow-list of operators that keep packed tokens apart; every other operator is rejected.

A value *has tokens* if it holds data for each token along one dimension of size T. `mixing` follows that dimension
through the graph of a user's model; an unknown operator on such a value may mix tokens. Values without tokens
(parameters, sizes and values computed from these) may be combined in any way, unless their size is a number of tokens:
`arange(T)` counts through the packed row rather than through each sequence. The same holds for values that depend on
which sequences are packed together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.frontend.token_order import ARANGES, Routing, Rows, viewed
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.passes.graph_node import ALONG_SEQUENCES, DRAWN, dropout, operands, shape
from hydragraph.passes.operator_rules import MOVES, SPLITS, VIEWS, is_pointwise, split_dim
from hydragraph.private.tracing import symbol_name, symbols_in

aten = torch.ops.aten

# Operators that work along the dimensions named by argument 1, or along all dimensions by default.
_ALONG = frozenset(
    {
        *(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default),
        *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.prod.dim_int),
        *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.median.dim, aten.any.dim),
        *(aten.all.dim, aten.var.correction, aten.std.correction, aten.std.dim, aten.var.dim, aten.logsumexp.default),
        *(aten.cumsum.default, aten.cumprod.default, aten.flip.default, aten.linalg_vector_norm.default),
        *(aten.norm.ScalarOpt_dim, aten.index_select.default, aten.gather.default, aten.glu.default),
        *(aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.squeeze.dim, aten.cummax.default),
        *(aten.unbind.int, aten.tril.default, aten.triu.default, aten.renorm.default),
        *(aten.slice_scatter.default, aten.repeat_interleave.self_int),
        *(aten.std_mean.dim, aten.std_mean.correction, aten.var_mean.dim, aten.var_mean.correction),
        *(aten.mode.default, aten.nansum.default, aten.nanmean.default, aten.nanmedian.dim, aten.logcumsumexp.default),
    }
)
# Position of the argument that names an operator's dimension, where it is not argument 1.
_DIM_AT: Mapping[Any, int] = {
    aten.norm.ScalarOpt_dim: 2,
    aten.linalg_vector_norm.default: 2,
    aten.linalg_norm.default: 2,
    aten.diff.default: 2,
    **dict.fromkeys((aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default), 2),
    aten.scatter_reduce.two: 1,
    aten.kthvalue.default: 2,
    aten.quantile.scalar: 2,
    aten.aminmax.default: 1,
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.argsort.default: 1,
    aten.roll.default: 2,
    aten.scatter.src: 1,
    aten.scatter.value: 1,
    aten.scatter_add.default: 1,
    aten.index_add.default: 1,
    aten.slice_scatter.default: 2,
    aten.repeat_interleave.self_int: 2,
}
_DEFAULT_DIM: Mapping[Any, int] = {
    **dict.fromkeys((aten.topk.default, aten.sort.default, aten.argsort.default, aten.glu.default), -1),
    **dict.fromkeys((aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default), -1),
    **dict.fromkeys((aten.kthvalue.default, aten.mode.default, aten.diff.default), -1),
    **dict.fromkeys((aten.unbind.int, aten.slice.Tensor, aten.slice_scatter.default), 0),
}
_MATRICES = frozenset({aten.matmul.default, aten.mm.default, aten.bmm.default})
# Operators that read only the sizes of their operands: their result is the same for every token.
MADE = frozenset(
    {
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default),
        *(aten.new_ones.default, aten.new_full.default, aten.zeros.default, aten.ones.default, aten.full.default),
        *(aten.scalar_tensor.default, aten.empty_like.default, aten.new_empty.default, aten.sym_size.int),
        aten.empty.memory_format,
    }
)
# Operators that use only the sizes or the dtype of their second operand.
_LIKE = frozenset({aten.expand_as.default, aten.view_as.default, aten.reshape_as.default, aten.type_as.default})
# Operators that move dimensions: the dimension of size T keeps the same tokens in order, as no other has that size.
_MOVES = MOVES | frozenset(
    {
        *(aten.t.default, aten.squeeze.default, aten.squeeze.dims, aten.one_hot.default, aten.repeat.default),
        *(aten.expand_as.default, aten.movedim.int, aten.movedim.intlist, aten.type_as.default, aten.mT.default),
        *(aten.swapaxes.default, aten.swapdims.default, aten.adjoint.default, aten.numpy_T.default),
    }
)
# Operators that process each row of the first dimension separately, and the number of dimensions this requires.
_ROWS: Mapping[Any, int] = {
    aten.group_norm.default: 2,
    aten.instance_norm.default: 3,
    aten.mv.default: 2,
    aten.avg_pool1d.default: 3,
    aten.conv1d.default: 3,
    aten.conv1d.padding: 3,
    aten.conv2d.default: 4,
    aten.conv2d.padding: 4,
    aten.avg_pool2d.default: 4,
    aten.adaptive_avg_pool1d.default: 3,
    aten.pixel_shuffle.default: 4,
}
_CONVOLUTIONS = frozenset({aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding})
_RESHAPES = VIEWS | {aten.view_as.default, aten.reshape_as.default}
# Elementwise operators that PyTorch does not tag as such.
_ELEMENTWISE = frozenset(
    {
        *(aten.real.default, aten.imag.default, aten.conj.default, aten._conj.default, aten.resolve_conj.default),
        *(aten.polar.default, aten.complex.default, aten.__or__.Tensor, aten.__and__.Tensor, aten.__xor__.Tensor),
        *(aten.__or__.Scalar, aten.__and__.Scalar, aten.__xor__.Scalar),
    }
)
# The result of a loss has no tokens.
LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default})
# Elementwise losses, whose last integer argument is the reduction.
_POINTWISE_LOSSES = frozenset(
    {
        *(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default),
        *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default),
        *(aten.soft_margin_loss.default, aten.margin_ranking_loss.default),
    }
)
_MIXES = "mixes the tokens of packed sequences"
_COUNTS = "counts through a packed row; use position_ids"
_PACKED = "computes with cu_seqlens or max_length, which depend on what is packed together"
_ROUTED = "tells where in a packed row tokens are sent, outside of sending them there and back"
_FIRST = Rows(0, 1)
_SPATIAL = frozenset({aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default})


# Callback for operators that sum over tokens: whether the operator does, or a description of what it does wrong.
Sums = Callable[[fx.Node, Mapping[fx.Node, Rows]], bool | str]


def mixing(graph: fx.GraphModule, tokens: str, given: int = 0, sums: Sums | None = None) -> tuple[str, str] | None:
    """Return the first operator of a graph that may mix tokens and what it does, or None.

    Args:
        tokens: the symbol of the token count; inputs with one dimension of this size have tokens along it.
        given: number of placeholders, at the end, that are not parameters or buffers.
        sums: for a loss: called for each operator first.
    """
    rows: dict[fx.Node, Rows] = {}
    bounds = _bounds(graph, tokens, given)
    routing = Routing(rows, tokens)
    for node in graph.graph.nodes:
        dims = _token_dims(node, tokens)
        if node.op == "placeholder" and len(dims) == 1:
            rows[node] = Rows(dims[0], 1)
        summed = sums(node, rows) if sums is not None and node.op != "placeholder" else False
        if isinstance(summed, str):
            return str(node.target), summed
        if summed:
            continue
        # Values that leave a graph or are compared with labels must be in batch order again.
        if node.op == "output" or node.target in LOSSES:
            teller = next((n for n in node.all_input_nodes if routing.tells(n) or rows.get(n, _FIRST).order != 1), None)
            if teller is not None:
                return str(teller.target), _ROUTED
        if node.target in LOSSES and dims and classes_apart(node, rows):
            rows[node] = Rows(dims[0], 1)
        if node.op != "call_function" or not isinstance(_first_tensor(node), Tensor) or node.target in LOSSES:
            continue
        if routing.follow(node):
            continue
        if node.target not in ALONG_SEQUENCES | DRAWN and any(n in rows for n in node.all_input_nodes):
            bound = next((n for n in node.all_input_nodes if n in bounds), None)
            if bound is not None:
                return str(node.target), _PACKED
        why = _problem(node, rows, routing, dims, tokens)
        if why is not None:
            return why if isinstance(why, tuple) else (str(node.target), why)
        with_tokens = [n for n in _read(node) if n in rows]
        if with_tokens:
            attends = node.target in ALONG_SEQUENCES
            rows[node] = Rows(0, 1) if attends else _result(node, rows, with_tokens[0], dims[0], tokens)
    return None


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose elements are read, not only their sizes."""
    if node.target in MADE:
        return []
    return node.all_input_nodes[:1] if node.target in _LIKE else node.all_input_nodes


def classes_apart(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Return whether a classification loss has its classes along a different dimension from the tokens."""
    first = operands(node)[0]
    return first in rows and rows[first].dim != min(1, len(shape(first)) - 1)


def _bounds(graph: fx.GraphModule, tokens: str, given: int) -> set[fx.Node]:
    """Return the values that depend on which sequences are packed together, but not on any token."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    bounds = {n for n in placeholders[len(placeholders) - given :] if not _token_dims(n, tokens)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target not in MADE and not _token_dims(node, tokens):
            from_bounds = any(n in bounds for n in node.all_input_nodes)
            # An operator that combines tokens, such as a sum over them, is rejected at that operator.
            if from_bounds and not any(_token_dims(n, tokens) for n in node.all_input_nodes):
                bounds.add(node)
        elif node.target is aten.sym_size.int and operands(node)[0] in bounds:
            bounds.add(node)
    return bounds


def _result(node: fx.Node, rows: Mapping[fx.Node, Rows], operand: fx.Node, dim: int, tokens: str) -> Rows:
    """Return the rows of a value computed from values with rows."""
    seen = viewed(node, rows, dim, tokens) if node.target in _RESHAPES else None
    return seen or Rows(dim, rows[operand].order)


def _problem(
    node: fx.Node, rows: Mapping[fx.Node, Rows], routing: Routing, dims: list[int], tokens: str
) -> str | tuple[str, str] | None:
    """Return what an operator does that may mix tokens, or an earlier operator together with what that one does."""
    from_sizes = node.target in MADE
    with_tokens = [n for n in _read(node) if n in rows]
    teller = next((n for n in node.all_input_nodes if routing.tells(n)), None) if not from_sizes else None
    if teller is not None:
        return (str(teller.target), _COUNTS) if teller.target in ARANGES else _ROUTED
    scaled = any(_is_size(n, tokens) for n in node.all_input_nodes)
    if scaled and (_is_pointwise(node) or node.target in (aten.full.default, aten.scalar_tensor.default)):
        return "computes with the number of tokens of a packed row"
    # Values that are the same for all tokens stay the same. A value as long as the row that is not computed from tokens
    # counts through the row: position 3 of the row is position 0 of the second sequence.
    if not with_tokens:
        sized = bool(dims) or any(_token_dims(n, tokens) for n in node.all_input_nodes)
        uniform = from_sizes or node.target in _RESHAPES or node.target in _MOVES or _is_pointwise(node)
        return _COUNTS if sized and not uniform else None
    orders = {rows[n].order for n in with_tokens}
    if node.target in ALONG_SEQUENCES:
        return None if orders == {1} else _ROUTED
    if node.target is dropout:  # its keys are in the order of the batch
        x, *_, token_dim = operands(node)[:7]
        return None if orders == {1} and x in rows and rows[x].dim == token_dim else _MIXES
    if len(orders) > 1 or len(dims) != 1:
        return _MIXES
    if node.target in _RESHAPES:
        return None if viewed(node, rows, dims[0], tokens) is not None else _MIXES
    return None if keeps(node, with_tokens, {n: rows[n].dim for n in with_tokens}, dims[0]) else _MIXES


def _is_pointwise(node: fx.Node) -> bool:
    return is_pointwise(node) or node.target in _ELEMENTWISE or _is_pointwise_loss(node)


def _is_pointwise_loss(node: fx.Node) -> bool:
    """Return whether an operator is an elementwise loss without reduction (reduction="none", encoded as 0)."""
    if node.target not in _POINTWISE_LOSSES:
        return False
    options = [a for a in node.args if type(a) is int]
    reduction = options[-1] if options else node.kwargs.get("reduction")
    return type(reduction) is int and reduction == 0


def _is_size(node: fx.Node, tokens: str) -> bool:
    """Return whether a value is a number derived from the token count."""
    value = value_of(node)
    return isinstance(value, torch.SymInt | torch.SymFloat) and tokens in symbols_in(value)


def keeps(node: fx.Node, with_tokens: list[fx.Node], dims: Mapping[fx.Node, int], dim: int) -> bool:
    """Return whether each token of the result is computed from the same token of the operands."""
    target = node.target
    arguments = operands(node)
    ndim = len(shape(node)) if isinstance(value_of(node), Tensor) else 0
    first = arguments[0]
    if target in (operator.getitem, communicate) or target in _SPATIAL:
        return True
    if _is_pointwise(node):
        return all(dims[n] + ndim - len(shape(n)) == dim for n in with_tokens)
    if target is aten.broadcast_tensors.default:
        width = len(_first_tensor(node).shape)
        return all(dims[n] + width - len(shape(n)) == dim for n in with_tokens)
    if target is aten.cosine_similarity.default:
        width = max(len(shape(n)) for n in arguments[:2])
        places = {dims[n] + width - len(shape(n)) for n in with_tokens}
        return len(places) == 1 and (arguments[2] if len(arguments) > 2 else 1) % width not in places
    if target is aten.einsum.default:
        return _einsum_keeps(node, with_tokens, dims, dim)
    if target in (aten.cat.default, aten.stack.default):
        axis = (arguments[1] if len(arguments) > 1 else 0) % ndim
        return axis != dim and len({dims[n] for n in with_tokens}) == 1
    if target is aten.bilinear.default:
        return all(n in arguments[:2] and dims[n] == dim < ndim - 1 for n in with_tokens) and arguments[2] not in dims
    if is_pointwise_convolution(node) and with_tokens == [first] and dims[first] > 1:
        return True
    if target in _ROWS:
        return with_tokens == [first] and dims[first] == 0 and len(shape(first)) >= _ROWS[target]
    if target is aten.index_put.default:
        return _is_masked_fill(node, dims)
    if target in (aten.linear.default, aten.inner.default):
        return with_tokens == [first] and dims[first] < len(shape(first)) - 1
    if target in (aten.outer.default, aten.ger.default):  # [T] x [N] -> [T, N], and [N] x [T] -> [N, T]
        return len(with_tokens) == 1 and with_tokens == [arguments[dim]]
    if target is aten.addmm.default:
        return with_tokens == [arguments[1]] and dims[arguments[1]] == 0
    if target in _MATRICES:
        return _product_keeps(arguments[0], arguments[1], dims)
    if target is aten.embedding.default:
        return with_tokens == [arguments[1]]
    if target is aten.index.Tensor:
        return first not in dims or all(
            i is None or (d != dims[first] and i not in dims) for d, i in enumerate(arguments[1])
        )
    if target is aten.slice.Tensor and str(shape(node)) == str(shape(first)):  # all of it, as x[-T:] is
        return (arguments[4] if len(arguments) > 4 else 1) == 1
    if target is aten.select_scatter.default:  # the second operand has no dimension `at`
        at = arguments[2] % ndim
        return dim != at and all(dims[n] == (dim if n is first else dim - (dim > at)) for n in with_tokens)
    if target in (aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default):
        return with_tokens == [first] and dims[first] < len(shape(first)) - len(arguments[1])
    if target in _MOVES:
        return symbol_name(shape(first)[dims[first]]) == symbol_name(shape(node)[dim])
    if target in SPLITS or target in (aten.tensor_split.sections, aten.tensor_split.indices):
        return split_dim(node) != dims[with_tokens[0]]
    if target in (aten.constant_pad_nd.default, aten.pad.default):
        padded = {len(shape(first)) - 1 - i // 2 for i, p in enumerate(arguments[1]) if p}
        return dims[first] not in padded
    # A lookup table of the model, indexed by tokens.
    if target is aten.gather.default and first not in dims:
        return bool(arguments[1] % len(shape(first)) == dim)
    if target in (aten.view_as_complex.default, aten.view_as_real.default):
        return dims[first] == dim < len(shape(node)) - (target is aten.view_as_real.default)
    if target in _ALONG or target in _DIM_AT:
        return _along_keeps(node, with_tokens, dims)
    return False


def is_pointwise_convolution(node: fx.Node) -> bool:
    """Return whether an operator is a convolution with windows of one element: a linear layer over the channels."""
    if node.target not in _CONVOLUTIONS:
        return False
    width = len(shape(node)) - 2
    weight, *options = operands(node)[1:]
    stride, padding = ([*options[1:3], *([1], [0])[max(0, len(options) - 1) :]])[:2]
    stride, padding = node.kwargs.get("stride", stride), node.kwargs.get("padding", padding)
    return (
        list(shape(weight)[2:]) == [1] * width and {*stride} == {1} and (isinstance(padding, str) or {*padding} == {0})
    )


def _along_keeps(node: fx.Node, with_tokens: list[fx.Node], dims: Mapping[fx.Node, int]) -> bool:
    axes = axes_of(node)
    if axes is None or len({dims[n] for n in with_tokens}) != 1:
        return False
    if node.target in (aten.tril.default, aten.triu.default):
        return dims[with_tokens[0]] < len(shape(operands(node)[0])) - 2
    return bool(axes) and dims[with_tokens[0]] not in axes


def axes_of(node: fx.Node) -> list[int] | None:
    """Return the dimensions of the first operand along which an operator works, or None if it names none."""
    arguments = operands(node)
    at = _DIM_AT.get(node.target, 1)
    named: Any = arguments[at] if len(arguments) > at else node.kwargs.get("dim", _DEFAULT_DIM.get(node.target))
    if named is None:
        return None
    return [axis % len(shape(arguments[0])) for axis in ([named] if isinstance(named, int) else named)]


def _is_masked_fill(node: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    """Return whether an operator writes one number wherever a mask over tokens is set: x[mask] = 0."""
    first, places, value = operands(node)[:3]
    mask = places[0] if len(places) == 1 else None
    if mask is None or first not in dims or mask not in dims or value in dims or value_of(value).numel() != 1:
        return False
    return value_of(mask).dtype is torch.bool and dims[mask] == dims[first]


def _einsum_keeps(node: fx.Node, with_tokens: list[fx.Node], dims: Mapping[fx.Node, int], dim: int) -> bool:
    """Return whether all operands use the same letter for tokens, and the result does too."""
    equation, parts = operands(node)[:2]
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        return False
    terms = left.split(",")
    # Dimensions covered by an ellipsis get their own letters, aligned from the last one.
    widths = [len(shape(part)) - len(term.replace("...", "")) for term, part in zip(terms, parts, strict=True)]
    more = [chr(0x100 + i) for i in range(max(widths))]
    terms = [t.replace("...", "".join(more[len(more) - n :])) for t, n in zip(terms, widths, strict=True)]
    letters = {term[dims[part]] for term, part in zip(terms, parts, strict=True) if part in dims}
    return len(letters) == 1 and right.replace("...", "".join(more))[dim : dim + 1] in letters


def _product_keeps(a: fx.Node, b: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    """Return whether a product neither sums over tokens nor pairs one token with another."""
    if a in dims and dims[a] == len(shape(a)) - 1:
        return False
    if b in dims and a not in dims:
        return dims[b] != len(shape(b)) - 2 and len(shape(b)) > 1
    if b in dims and (dims[b] >= len(shape(b)) - 2 or len(shape(b)) < 3):
        return False
    return b not in dims or dims[a] - len(shape(a)) == dims[b] - len(shape(b))


def _token_dims(node: fx.Node, tokens: str) -> list[int]:
    """Return the dimensions whose size depends on the token count."""
    tensor = _first_tensor(node)
    if not isinstance(tensor, Tensor):
        return []
    return [d for d, s in enumerate(tensor.shape) if symbol_name(s) is not None and _counts(s, tokens)]


def _counts(size: Any, tokens: str) -> bool:
    return tokens in symbols_in(size)


def _first_tensor(node: fx.Node) -> Any:
    value = value_of(node)
    return value[0] if isinstance(value, tuple | list) and value else value

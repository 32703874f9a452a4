"""Allow-list of operators that keep packed tokens separate.

A value *has tokens* if it contains data for each token along a dimension of size T. Operators may combine other values
freely, unless these values or their sizes depend on the packing, as `arange(T)` does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.frontend.token_order import ARANGES, RoutingTracker, TokenRows, viewed
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.passes.graph_node import ALONG_SEQUENCES, DRAWN, dropout, operands, shape
from hydragraph.passes.operator_rules import MOVES, SPLITS, VIEWS, is_pointwise, split_dim
from hydragraph.private.operator_schemas import argument_of, arguments_of, aten_operators, has_tag
from hydragraph.private.tracing import symbol_name, symbols_in

aten = torch.ops.aten

# Operators that combine values along the dimensions `dim`, by default all.
_ALONG = aten_operators("""
    softmax.int _softmax log_softmax.int _log_softmax logsumexp logcumsumexp cumsum cumprod cummax
    mean.dim sum.dim_IntList prod.dim_int amax amin aminmax max.dim min.dim argmax argmin any.dim all.dim
    median.dim mode nansum nanmean nanmedian.dim kthvalue quantile.scalar topk sort argsort
    var.correction var.dim var_mean.correction var_mean.dim std.correction std.dim std_mean.correction std_mean.dim
    linalg_matrix_norm linalg_matrix_norm.str_ord
    norm.ScalarOpt_dim linalg_norm linalg_vector_norm fft_fft fft_ifft fft_rfft fft_irfft diff flip roll glu
    select.int slice.Tensor narrow squeeze.dim unbind.int repeat_interleave.self_int
    index_select gather index_add scatter.src scatter.value scatter_add scatter_reduce.two slice_scatter
""")
_TRIANGLES = aten_operators("tril triu")
_MATRICES = aten_operators("matmul mm bmm")
# Operators that read only operands' sizes.
MADE = aten_operators("""
    zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty zeros ones full
    empty.memory_format scalar_tensor sym_size.int
""")
_LIKE = aten_operators("expand_as view_as reshape_as type_as")  # read only the sizes or dtype of the second operand
# Operators that move dimensions; only the token dimension has size T, so it stays known.
_MOVES = MOVES | aten_operators("""
    t squeeze squeeze.dims one_hot repeat expand_as movedim.int movedim.intlist type_as mT swapaxes swapdims adjoint
    numpy_T
""")
# Operators that keep rows of the first dimension separate, by the minimum number of dimensions.
_ROWS: Mapping[int, frozenset[Any]] = {
    2: aten_operators("group_norm mv"),
    3: aten_operators("instance_norm avg_pool1d adaptive_avg_pool1d conv1d conv1d.padding"),
    4: aten_operators("conv2d conv2d.padding avg_pool2d pixel_shuffle"),
}
# Two inputs, followed by weights.
_OF_TWO = aten_operators("bilinear gru_cell rnn_tanh_cell rnn_relu_cell")
_CONVOLUTIONS = aten_operators("conv1d conv1d.padding conv2d conv2d.padding")
RESHAPES = VIEWS | aten_operators("view_as reshape_as")
LOSSES = aten_operators("cross_entropy_loss nll_loss_nd multi_margin_loss")
_POINTWISE_LOSSES = aten_operators("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss margin_ranking_loss
""")
_MIXES = "may mix the tokens of packed sequences"
COUNTS = "counts the tokens of a packed row; use position_ids"
_PACKED = "computes with cu_seqlens or max_length, which depend on the other packed sequences"
_ROUTED = "permutes tokens without restoring their order, or uses their positions or counts as data"
_OF_BATCH = ("cu_seqlens", "max_length", "keys", "block")
_SIZES = ("size", "sizes", "shape", "length", "repeats", "output_size")
_FIRST = TokenRows(0, 1)
_BATCH_NORMS = aten_operators("batch_norm _native_batch_norm_legit_no_training")


def mixing(graph: fx.GraphModule, tokens: str, given: int = 0) -> tuple[str, str] | None:
    """Return the first operator that may mix tokens, and how, or None.

    Args:
        tokens: symbol of the token count.
        given: number of the graph's inputs, which are the last placeholders.
    """
    # rows: value with tokens -> its token dimension, and the order of tokens along it.
    rows: dict[fx.Node, TokenRows] = {}
    # Values that depend on the packing, not on single tokens.
    placeholders = placeholders_of(graph)
    bounds = {n for n in placeholders[len(placeholders) - given :] if not token_dims(n, tokens)}
    routing = RoutingTracker(rows, tokens)
    for node in graph.graph.nodes:
        dims = token_dims(node, tokens)
        if node.op == "placeholder" and len(dims) == 1:
            rows[node] = TokenRows(dims[0], 1)
        # Results and the loss's operands must be in batch order.
        is_loss = node.target in LOSSES and _is_returned(node)
        if node.op == "output" or is_loss:
            teller = next((n for n in node.all_input_nodes if routing.tells(n) or rows.get(n, _FIRST).order != 1), None)
            if teller is not None:
                return str(teller.target), _ROUTED
        if node.op != "call_function" or is_loss:
            continue
        # A result of the packing may be passed on, but not enter values with tokens.
        packed = any(n in bounds for n in _data(node)) or _has_other_sizes(node, tokens)
        with_tokens = [n for n in _read(node) if n in rows]
        if packed and not with_tokens:
            bounds.add(node)
        if not isinstance(first_tensor(node), Tensor) or routing.follow(node):
            continue
        if packed and with_tokens:
            return str(node.target), _PACKED
        why = _problem(node, rows, routing, dims, tokens)
        if why is not None:
            return why if isinstance(why, tuple) else (str(node.target), why)
        if with_tokens:
            attends = node.target in ALONG_SEQUENCES
            seen = viewed(node, rows, dims[0], tokens) if node.target in RESHAPES else None
            # Attention returns [T, H, D] in batch order; others keep their operands' order.
            rows[node] = TokenRows(0, 1) if attends else seen or TokenRows(dims[0], rows[with_tokens[0]].order)
    return None


def _is_returned(node: fx.Node) -> bool:
    return all(n.op == "output" or (n.target in VIEWS and _is_returned(n)) for n in node.users)


def _read(node: fx.Node) -> list[fx.Node]:
    if node.target in MADE:
        return [n for n in node.all_input_nodes if not isinstance(value_of(n), Tensor)]
    return node.all_input_nodes[:1] if node.target in _LIKE else node.all_input_nodes


def _data(node: fx.Node) -> list[fx.Node]:
    if node.target not in ALONG_SEQUENCES | DRAWN:
        return _read(node)
    return [a.value for a in arguments_of(node) if isinstance(a.value, fx.Node) and a.name not in _OF_BATCH]


def _problem(
    node: fx.Node, rows: Mapping[fx.Node, TokenRows], routing: RoutingTracker, dims: list[int], tokens: str
) -> str | tuple[str, str] | None:
    from_sizes = node.target in MADE
    with_tokens = [n for n in _read(node) if n in rows]
    teller = next((n for n in node.all_input_nodes if routing.tells(n)), None) if not from_sizes else None
    if teller is not None:
        return (str(teller.target), COUNTS) if teller.target in ARANGES else _ROUTED
    # A value of size T without token data may count tokens.
    sized = not with_tokens and (bool(dims) or any(token_dims(n, tokens) for n in node.all_input_nodes))
    if sized and not (from_sizes or node.target in RESHAPES or node.target in _MOVES or _is_pointwise(node)):
        return COUNTS
    if any(tokens in symbols_in(value_of(n)) for n in sizes_read(node)):
        return "computes with the number of tokens of a packed row"
    if not with_tokens:
        return None
    orders = {rows[n].order for n in with_tokens}
    if node.target in ALONG_SEQUENCES:
        return None if orders == {1} else _ROUTED
    if len(orders) > 1 or len(dims) != 1:
        return _MIXES
    if node.target in RESHAPES:
        return None if viewed(node, rows, dims[0], tokens) is not None else _MIXES
    return None if keeps(node, with_tokens, {n: rows[n].dim for n in with_tokens}, dims[0]) else _MIXES


def _is_pointwise(node: fx.Node) -> bool:
    if node.target in _POINTWISE_LOSSES:
        return bool(argument_of(node, "reduction") == 0)  # "none"
    return is_pointwise(node)


def sizes_read(node: fx.Node) -> list[fx.Node]:
    """Return the symbolic numbers that an operator reads, except sizes of its result."""
    if node.target is aten.slice.Tensor and str(shape(node)) == str(shape(operands(node)[0])):  # x[-T:]
        return []
    read: list[fx.Node] = []
    fx.map_arg([a.value for a in arguments_of(node) if a.name not in _SIZES], read.append)
    return [n for n in read if isinstance(value_of(n), torch.SymInt | torch.SymFloat)]


def _has_other_sizes(node: fx.Node, tokens: str) -> bool:
    value = first_tensor(node)
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(symbols_in(s) - {tokens} for s in sizes if isinstance(s, torch.SymInt | torch.SymFloat | torch.SymBool))


def keeps(node: fx.Node, with_tokens: list[fx.Node], dims: Mapping[fx.Node, int], dim: int) -> bool:
    """Return whether each token of the result depends only on this token of the operands."""
    target = node.target
    arguments = operands(node)
    ndim = len(first_tensor(node).shape)
    first = arguments[0]
    if target in (operator.getitem, communicate) or target in _BATCH_NORMS:
        return True
    if _is_pointwise(node) or target is aten.broadcast_tensors.default:
        # Broadcasting aligns the last dimensions: dimension d moves to d + ndim - len(shape(n)).
        return all(dims[n] + ndim - len(shape(n)) == dim for n in with_tokens)
    if target is aten.cosine_similarity.default:
        width = max(len(shape(n)) for n in arguments[:2])
        places = {dims[n] + width - len(shape(n)) for n in with_tokens}
        return len(places) == 1 and argument_of(node, "dim") % width not in places
    if target is aten.einsum.default:
        return _einsum_keeps(node, dims, dim)
    if target in (aten.cat.default, aten.stack.default):
        return argument_of(node, "dim") % ndim != dim and len({dims[n] for n in with_tokens}) == 1
    # dropout keys are in batch order
    if target is dropout:
        return bool(dims.get(first, dim) == arguments[6])
    if target in LOSSES:
        return first in dims and argument_of(node, "reduction") == 0
    if target in _OF_TWO:
        return all(n in arguments[:2] and dims[n] == dim < ndim - 1 for n in with_tokens) and arguments[2] not in dims
    if _is_pointwise_convolution(node) and with_tokens == [first] and dims[first] > 1:
        return True
    if rows := next((rows for rows, targets in _ROWS.items() if target in targets), None):
        return with_tokens == [first] and dims[first] == 0 and len(shape(first)) >= rows
    if target is aten.index_put.default:
        return _is_masked_fill(node, dims)
    if target in (aten.linear.default, aten.inner.default):
        return with_tokens == [first] and dims[first] < len(shape(first)) - 1
    if target is aten.bucketize.Tensor:
        return with_tokens == [first]
    # [T] x [N] -> [T, N], and [N] x [T] -> [N, T]
    if target in (aten.outer.default, aten.ger.default):
        return len(with_tokens) == 1 and with_tokens == [arguments[dim]]
    if target is aten.addmm.default:
        return with_tokens == [arguments[1]] and dims[arguments[1]] == 0
    if target in _MATRICES:
        return _product_keeps(arguments[0], arguments[1], dims)
    if target is aten.embedding.default:
        return with_tokens == [arguments[1]]
    if target is aten.index.Tensor:
        indices = [(d, i) for d, i in enumerate(arguments[1]) if i is not None]
        return first not in dims or all(d != dims[first] and i not in dims for d, i in indices)
    if target is aten.slice.Tensor and str(shape(node)) == str(shape(first)):
        return bool(argument_of(node, "step") == 1)
    # The second operand has no dimension `at`
    if target is aten.select_scatter.default:
        at = arguments[2] % ndim
        return dim != at and all(dims[n] == (dim if n is first else dim - (dim > at)) for n in with_tokens)
    if target in (aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default):
        return with_tokens == [first] and dims[first] < len(shape(first)) - len(arguments[1])
    if target in _MOVES:
        return symbol_name(shape(first)[dims[first]]) == symbol_name(shape(node)[dim])
    if target in SPLITS or target in (aten.tensor_split.sections, aten.tensor_split.indices):
        return split_dim(node) != dims[with_tokens[0]]
    if target in (aten.constant_pad_nd.default, aten.pad.default):
        # Two numbers per dimension, from the last dimension on.
        padded = {len(shape(first)) - 1 - i // 2 for i, p in enumerate(arguments[1]) if p}
        return dims[first] not in padded
    # Each token looks up a row in a table.
    if target is aten.gather.default and first not in dims:
        return bool(arguments[1] % len(shape(first)) == dim)
    if target in (aten.view_as_complex.default, aten.view_as_real.default):
        return dims[first] == dim < len(shape(node)) - (target is aten.view_as_real.default)
    if target in _TRIANGLES:
        return with_tokens == [first] and dims[first] < ndim - 2
    if target is aten.renorm.default:
        return bool(dims[first] == argument_of(node, "dim") % ndim)
    return target in _ALONG and _along_keeps(node, with_tokens, dims)


def _is_pointwise_convolution(node: fx.Node) -> bool:
    if node.target not in _CONVOLUTIONS:
        return False
    width = len(shape(node)) - 2
    stride = argument_of(node, "stride")
    padding = argument_of(node, "padding")
    unpadded = isinstance(padding, str) or {*padding} == {0}
    return list(shape(operands(node)[1])[2:]) == [1] * width and {*stride} == {1} and unpadded


def _along_keeps(node: fx.Node, with_tokens: list[fx.Node], dims: Mapping[fx.Node, int]) -> bool:
    named = argument_of(node, "dim", "dims")
    named = [named] if isinstance(named, int) else named or []
    axes = [axis % len(shape(operands(node)[0])) for axis in named]
    return bool(axes) and len({dims[n] for n in with_tokens}) == 1 and dims[with_tokens[0]] not in axes


def _is_masked_fill(node: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    first, places, value = operands(node)[:3]
    mask = places[0] if len(places) == 1 else None
    if mask is None or first not in dims or mask not in dims or value in dims or value_of(value).numel() != 1:
        return False
    return value_of(mask).dtype is torch.bool and dims[mask] == dims[first]


def _einsum_keeps(node: fx.Node, dims: Mapping[fx.Node, int], dim: int) -> bool:
    equation, parts = operands(node)[:2]
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        return False
    terms = left.split(",")
    # Give an ellipsis's dimensions letters.
    widths = [len(shape(part)) - len(term.replace("...", "")) for term, part in zip(terms, parts, strict=True)]
    more = [chr(0x100 + i) for i in range(max(widths))]
    terms = [t.replace("...", "".join(more[len(more) - n :])) for t, n in zip(terms, widths, strict=True)]
    # For "te,ehd->thd" with the tokens of both sides in dimension 0, letters = {"t"}.
    letters = {term[dims[part]] for term, part in zip(terms, parts, strict=True) if part in dims}
    return len(letters) == 1 and right.replace("...", "".join(more))[dim : dim + 1] in letters


def _product_keeps(a: fx.Node, b: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    # In a[..., i, k] @ b[..., k, j], tokens may be i, j or a common batch dimension, but not k.
    if a in dims and dims[a] == len(shape(a)) - 1:
        return False
    if b in dims and a not in dims:
        return dims[b] != len(shape(b)) - 2 and len(shape(b)) > 1
    if b in dims and (dims[b] >= len(shape(b)) - 2 or len(shape(b)) < 3):
        return False
    return b not in dims or dims[a] - len(shape(a)) == dims[b] - len(shape(b))


def symbolic_dims(node: fx.Node) -> list[int]:
    tensor = first_tensor(node)
    sizes: list[Any] = list(tensor.shape) if isinstance(tensor, Tensor) else []
    return [d for d, size in enumerate(sizes) if symbol_name(size) is not None]


def token_dims(node: fx.Node, tokens: str) -> list[int]:
    return [d for d in symbolic_dims(node) if tokens in symbols_in(first_tensor(node).shape[d])]


def first_tensor(node: fx.Node) -> Any:
    value = value_of(node)
    return value[0] if isinstance(value, (tuple, list)) and value else value


def computed_alike(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(computed_alike, one, other))
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if one is other or one.op != "call_function" or one.target is not other.target or one.kwargs != other.kwargs:
        return one is other
    return not has_tag(one.target, torch.Tag.nondeterministic_seeded) and computed_alike(one.args, other.args)

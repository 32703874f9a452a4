"""Rejection of operators that would mix packed sequences: only `varlen_attention` may mix tokens.

This is a check by name and shape on the traced graph. It rejects other attention operators, products and softmaxes over
the token dimension, scores between all pairs of tokens, and running sums, convolutions and shifts along the tokens. It
cannot detect mixing through index arithmetic; `hydragraph verify` compares with the model on each sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.token_axes import is_pointwise_convolution, mixing
from hydragraph.frontend.token_order import SAME
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Template
from hydragraph.passes.graph_node import ALONG_SEQUENCES, operands
from hydragraph.private.tracing import symbol_name

aten = torch.ops.aten

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "multi_head_attention", "encoder_layer")
# Operators that mix elements along the dimension that they name.
_ALONG = frozenset(
    {
        aten.softmax.int,
        aten._softmax.default,
        aten.log_softmax.int,
        aten._log_softmax.default,
        aten.cumsum.default,
        aten.cumprod.default,
        aten.logcumsumexp.default,
        aten.flip.default,
        aten.roll.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.amax.default,
        aten.amin.default,
        aten.max.dim,
        aten.min.dim,
        aten.var.correction,
        aten.logsumexp.default,
    }
)
# Operators that reduce all dimensions.
_ALL = frozenset({aten.mean.default, aten.sum.default, aten.max.default, aten.min.default})
# Parts of names of operators that mix elements along the dimensions after the channels.
_SPATIAL = ("conv", "group_norm", "instance_norm")
_PRODUCTS = frozenset({aten.matmul.default, aten.mm.default, aten.bmm.default})
REMEDY = (
    "call hydragraph.varlen_attention(q, k, v, cu_seqlens) for attention, as it keeps packed sequences apart; compute "
    "anything else from each token alone, such as a mean over features"
)


def refuse_mixing(graph: fx.GraphModule, tokens: str | None, where: str) -> None:
    """Raise Unsupported for an operator that mixes packed tokens.

    Args:
        graph: one part of the model.
        tokens: the symbol of the token count; None: look for attention operators only.
        where: name of the part, for the error.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in ALONG_SEQUENCES:
            continue
        name = str(node.target)
        if any(part in name for part in _ATTENTION) and "hydragraph" not in name:
            raise Unsupported(
                f"attention by {name}, in which packed sequences would see each other", where=where, remedy=REMEDY
            )
        _refuse_options(node, where)
        if tokens is not None and _mixes(node, name, tokens):
            raise Unsupported(f"{name} mixes the tokens of packed sequences", where=where, remedy=REMEDY)


def refuse_unproven(template: Template, tokens: str, where: str) -> None:
    """Raise Unsupported for the first operator of a template that is not known to keep tokens separate."""
    refuse_mixing(template.graph, tokens, where)
    mixer = mixing(template.graph, tokens, len(template.inputs))
    if mixer is not None:
        raise Unsupported(f"{mixer[0]} {mixer[1]}", where=where, remedy=REMEDY)


# Arguments that make an operator use a whole batch, by position: what each does, and a remedy.
_OPTIONS: Mapping[Any, tuple[tuple[int, str, str], ...]] = {
    aten.embedding.default: (
        (3, "scale_grad_by_freq=True, which counts the tokens of a whole batch", "embed without scale_grad_by_freq"),
        (4, "sparse=True, whose gradient is not a dense tensor", "embed without sparse"),
    ),
    aten.batch_norm.default: (
        (5, "batch norm takes its statistics over the tokens of a batch", "use a norm over features"),
    ),
}


def _refuse_options(node: fx.Node, where: str) -> None:
    arguments = operands(node)
    for at, what, remedy in _OPTIONS.get(node.target, ()):
        if len(arguments) > at and arguments[at]:
            raise Unsupported(what, where=where, remedy=remedy)


def refuse_other_bounds(template: Template, where: str, given: Mapping[str, str]) -> None:
    """Raise Unsupported for attention with bounds other than those of the packed sequences.

    Args:
        given: the template's inputs that are unmodified fields of the packed batch -> the field.
    """
    for node in template.graph.graph.nodes:
        if node.target in ALONG_SEQUENCES and given.get(field_of(operands(node)[3]) or "") != "cu_seqlens":
            raise Unsupported(
                "its attention takes sequence bounds that are not the packed batch's",
                where=where,
                remedy="hand cu_seqlens to hydragraph.varlen_attention as it is",
            )


def field_of(node: fx.Node) -> str | None:
    """Return the name of the placeholder that a value is, ignoring casts and copies, or None if it is computed."""
    while node.target in SAME:
        (node, *_) = operands(node)
    return node.name if node.op == "placeholder" else None


def _mixes(node: fx.Node, name: str, tokens: str) -> bool:
    first = operands(node)[0] if operands(node) else None
    dims_before = _dims(first, tokens)
    dims_after = _dims(node, tokens)
    if _is_float(node) and (len(dims_after) > 1 or _is_shifted(node)):
        return True
    if not dims_before:
        return False
    ndim = len(value_of(first).shape)  # type: ignore[union-attr]
    if node.target in _ALONG and _is_float(first):
        named = operands(node)[1] if len(operands(node)) > 1 and node.target is not aten.roll.default else None
        named = operands(node)[2] if node.target is aten.roll.default and len(operands(node)) > 2 else named
        dims = range(ndim) if named is None else [named] if isinstance(named, int) else named
        return any(d % ndim in dims_before for d in dims)
    if node.target in _PRODUCTS:
        return ndim - 1 in dims_before
    if node.target in _ALL:
        return _is_float(first) and len(operands(node)) == 1
    if is_pointwise_convolution(node):
        return False
    return any(part in name for part in _SPATIAL) and any(d >= 2 for d in dims_before)


def _dims(value: Any, tokens: str) -> list[int]:
    """Return the dimensions of a value whose size is the token count."""
    tensor = value_of(value) if isinstance(value, fx.Node) else None
    return (
        [d for d, s in enumerate(tensor.shape) if symbol_name(s) == tokens] if isinstance(tensor, torch.Tensor) else []
    )


def _is_float(value: Any) -> bool:
    tensor = value_of(value) if isinstance(value, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _is_shifted(node: fx.Node) -> bool:
    """Return whether a value has a few tokens more or fewer than the batch, as after a shift or padding."""
    names = (symbol_name(s) for s in value_of(node).shape)
    return any(n is not None and any(sign in n for sign in "+-") for n in names)

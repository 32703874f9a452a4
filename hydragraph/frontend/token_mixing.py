"""Rejection of operators that would mix packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.token_axes import mixing
from hydragraph.frontend.token_order import SAME
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Template
from hydragraph.passes.graph_node import ALONG_SEQUENCES, operands
from hydragraph.private.operator_schemas import argument_of
from hydragraph.private.tracing import symbol_name

aten = torch.ops.aten

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "multi_head_attention", "encoder_layer")
_PRODUCTS = ("matmul", "mm.", "softmax", "einsum")


def _remedy(operator: str) -> str:
    alone = "from one token only, such as a mean over features"
    if not any(part in operator for part in (*_ATTENTION, *_PRODUCTS)):
        return f"compute every result {alone}"
    return (
        "call hydragraph.varlen_attention(q, k, v, cu_seqlens) for attention: it keeps packed sequences separate; "
        f"compute every other result {alone}"
    )


def refuse_mixing(graph: fx.GraphModule, tokens: str | None, where: str) -> None:
    """Raise Unsupported if a graph attends across sequences, computes over a whole batch, or pairs or shifts tokens.

    Args:
        tokens: symbol of the token count; None allows pairs and shifts.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in ALONG_SEQUENCES:
            continue
        name = str(node.target)
        if any(part in name for part in _ATTENTION) and "hydragraph" not in name:
            what = f"packed sequences would attend to each other in {name}"
            raise Unsupported(what, where=where, remedy=_remedy(name))
        for option, (what, remedy) in _OPTIONS.get(node.target, {}).items():
            if argument_of(node, option):
                raise Unsupported(what, where=where, remedy=remedy)
        if tokens is not None and _pairs_or_shifts(node, tokens):
            raise Unsupported(f"{name} mixes tokens across packed sequences", where=where, remedy=_remedy(name))


def refuse_unproven(template: Template, tokens: str, where: str) -> None:
    refuse_mixing(template.graph, tokens, where)
    mixer = mixing(template.graph, tokens, len(template.inputs))
    if mixer is not None:
        raise Unsupported(f"{mixer[0]} {mixer[1]}", where=where, remedy=_remedy(mixer[0]))


# operator -> argument that acts on a whole batch -> problem and remedy
_OPTIONS: Mapping[Any, Mapping[str, tuple[str, str]]] = {
    aten.embedding.default: {
        "scale_grad_by_freq": (
            "scale_grad_by_freq=True counts the tokens of a whole batch",
            "remove scale_grad_by_freq=True from the embedding",
        ),
        "sparse": ("sparse=True makes the gradient a sparse tensor", "remove sparse=True from the embedding"),
    },
    aten.batch_norm.default: {
        "training": ("batch norm computes statistics over the tokens of a batch", "use a norm over features")
    },
}


def refuse_other_bounds(template: Template, where: str, given: Mapping[str, str | None]) -> None:
    """Raise Unsupported if attention does not use the batch's cu_seqlens; `given` maps inputs to batch fields."""
    for node in template.graph.graph.nodes:
        if node.target in ALONG_SEQUENCES and given.get(field_of(operands(node)[3]) or "") != "cu_seqlens":
            what = "the attention uses sequence bounds other than the packed batch's"
            raise Unsupported(what, where=where, remedy="pass cu_seqlens to hydragraph.varlen_attention unchanged")


def field_of(node: fx.Node) -> str | None:
    """Return the name of the placeholder that a value casts or copies, or None."""
    while node.target in SAME:
        (node, *_) = operands(node)
    return node.name if node.op == "placeholder" else None


def _pairs_or_shifts(node: fx.Node, tokens: str) -> bool:
    """Return whether a shape contains the token count twice, or a size such as T + 1."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    sizes = [name for size in value.shape if (name := symbol_name(size)) is not None]
    return sizes.count(tokens) > 1 or any(sign in name for name in sizes for sign in "+-")

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
_PRODUCTS = ("matmul", "mm.", "softmax", "einsum")  # of attention written by hand


def _remedy(operator: str) -> str:
    alone = "from each token alone, such as a mean over features"
    if not any(part in operator for part in (*_ATTENTION, *_PRODUCTS)):
        return f"compute it {alone}"
    return (
        "call hydragraph.varlen_attention(q, k, v, cu_seqlens) for attention, as it keeps packed sequences apart; "
        f"compute anything else {alone}"
    )


def refuse_mixing(graph: fx.GraphModule, tokens: str | None, where: str) -> None:
    """Raise Unsupported for other attention, whole-batch options, token pairs and shifts.

    Args:
        tokens: symbol of the token count; None: pairs and shifts pass.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in ALONG_SEQUENCES:
            continue
        name = str(node.target)
        if any(part in name for part in _ATTENTION) and "hydragraph" not in name:
            what = f"attention by {name}, in which packed sequences would see each other"
            raise Unsupported(what, where=where, remedy=_remedy(name))
        for option, (what, remedy) in _OPTIONS.get(node.target, {}).items():
            if argument_of(node, option):
                raise Unsupported(what, where=where, remedy=remedy)
        if tokens is not None and _pairs_or_shifts(node, tokens):
            raise Unsupported(f"{name} mixes the tokens of packed sequences", where=where, remedy=_remedy(name))


def refuse_unproven(template: Template, tokens: str, where: str) -> None:
    """Raise Unsupported for operators that may mix tokens."""
    refuse_mixing(template.graph, tokens, where)
    mixer = mixing(template.graph, tokens, len(template.inputs))
    if mixer is not None:
        raise Unsupported(f"{mixer[0]} {mixer[1]}", where=where, remedy=_remedy(mixer[0]))


# operator -> argument over a whole batch -> effect, and remedy
_OPTIONS: Mapping[Any, Mapping[str, tuple[str, str]]] = {
    aten.embedding.default: {
        "scale_grad_by_freq": (
            "scale_grad_by_freq=True, which counts the tokens of a whole batch",
            "embed without scale_grad_by_freq",
        ),
        "sparse": ("sparse=True, whose gradient is not a dense tensor", "embed without sparse"),
    },
    aten.batch_norm.default: {
        "training": ("batch norm takes its statistics over the tokens of a batch", "use a norm over features")
    },
}


def refuse_other_bounds(template: Template, where: str, given: Mapping[str, str]) -> None:
    """Raise Unsupported for attention with other bounds than the batch's; `given`: input -> field."""
    for node in template.graph.graph.nodes:
        if node.target in ALONG_SEQUENCES and given.get(field_of(operands(node)[3]) or "") != "cu_seqlens":
            what = "its attention takes sequence bounds that are not the packed batch's"
            raise Unsupported(what, where=where, remedy="pass cu_seqlens to hydragraph.varlen_attention unchanged")


def field_of(node: fx.Node) -> str | None:
    """Return the placeholder that a value is, casts or copies, or None."""
    while node.target in SAME:
        (node, *_) = operands(node)
    return node.name if node.op == "placeholder" else None


def _pairs_or_shifts(node: fx.Node, tokens: str) -> bool:
    """Return whether a value has pairs of tokens, or more or fewer tokens."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    sizes = [name for size in value.shape if (name := symbol_name(size)) is not None]
    return sizes.count(tokens) > 1 or any(sign in name for name in sizes for sign in "+-")

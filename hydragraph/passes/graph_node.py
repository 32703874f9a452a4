"""Accessors for nodes of forward graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

import hydragraph.kernels.attention_dropout
import hydragraph.kernels.causal_convolution
import hydragraph.kernels.dropout
import hydragraph.kernels.gated_delta_rule
import hydragraph.kernels.varlen_attention  # noqa: F401  these register the operators
from hydragraph.ir.graph_data import value_of

aten = torch.ops.aten
varlen = torch.ops.hydragraph.varlen_attention.default
attention_dropout = torch.ops.hydragraph.attention_dropout.default
dropout = torch.ops.hydragraph.dropout.default
# Operators that mix tokens of a sequence; their first seven arguments have the same meaning.
ATTENDING = frozenset({varlen, attention_dropout})
delta_rule = torch.ops.hydragraph.gated_delta_rule.default
causal_convolution = torch.ops.hydragraph.causal_convolution.default
# Operators whose fourth argument is cu_seqlens.
ALONG_SEQUENCES = ATTENDING | {delta_rule, causal_convolution}
# Matched by name, because not all releases of transformers register `grouped_mm_fallback`.
GROUPED = frozenset({"aten._grouped_mm.default", "aten.grouped_mm.default", "transformers.grouped_mm_fallback.default"})
CASTS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default})
COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.detach.default})
DRAWN = frozenset({dropout, attention_dropout})


def shape(node: fx.Node) -> list[Any]:
    return list(value_of(node).shape)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments, typed more narrowly than in FX."""
    return node.args


class Product(NamedTuple):
    """Operands of a product with a weight, or with one weight per expert.

    Attributes:
        weight: 2-D, or for experts [experts, in, out] or [experts, out, in].
        inner, outer: the weight's input and output dimensions.
        given: the node that the product reads: the weight or its transpose.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inner: int
    outer: int
    given: fx.Node


def product(node: fx.Node) -> Product | None:
    if is_grouped(node):
        x, operand = operands(node)[:2]
        weight = _untransposed(operand)
        inner, outer = (1, 2) if weight is operand else (2, 1)
        return Product(x, weight, None, inner, outer, operand)
    # Weights are [out, in] in `linear`, [in, out] in `addmm` (Conv1D of transformers) and `mm`.
    if node.target is aten.linear.default:
        x, weight, *bias = operands(node)
        return Product(x, weight, bias[0] if bias else None, 1, 0, weight)
    if node.target is aten.addmm.default:
        bias, x, weight = operands(node)[:3]
        return Product(x, weight, bias, 0, 1, weight)
    if node.target is aten.mm.default:
        x, weight = operands(node)
        return Product(x, weight, None, 0, 1, weight)
    return None


def is_grouped(node: fx.Node) -> bool:
    """Return whether a node multiplies each row by its expert's weight."""
    if node.target is aten.bmm.default:
        return _untransposed(operands(node)[1]).op == "placeholder"
    return node.op == "call_function" and str(node.target) in GROUPED


def _untransposed(weight: fx.Node) -> fx.Node:
    swaps = weight.target is aten.transpose.int and {d % 3 for d in operands(weight)[1:]} == {1, 2}
    return operands(weight)[0] if swaps else weight


def known_product(node: fx.Node) -> Product:
    parts = product(node)
    assert parts is not None, node
    return parts


def chosen_rows(node: fx.Node) -> fx.Node | None:
    """Return the placeholder whose rows an operator selects, or None."""
    if node.target is not aten.index.Tensor or len(operands(node)[1]) != 1:
        return None
    source: fx.Node = operands(node)[0]
    return source if source.op == "placeholder" else None


def sink(node: fx.Node) -> fx.Node | None:
    """Return the attention sinks [Hq] of an attention call, or None."""
    return operands(node)[10] if node.target is varlen and len(operands(node)) > 10 else None

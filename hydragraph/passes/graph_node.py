"""Access to one node of a forward graph: its operands, the sizes of its value, and the product that it may be."""

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
# Operators that mix tokens, of one sequence only; their first seven arguments are the same.
ATTENDING = frozenset({varlen, attention_dropout})
delta_rule = torch.ops.hydragraph.gated_delta_rule.default
causal_convolution = torch.ops.hydragraph.causal_convolution.default
# All operators that mix tokens, of one sequence only; their fourth argument is cu_seqlens.
ALONG_SEQUENCES = ATTENDING | {delta_rule, causal_convolution}
DRAWN = frozenset({dropout, attention_dropout})  # operators with random masks


def shape(node: fx.Node) -> list[Any]:
    """Return the traced sizes of a node's value."""
    return list(value_of(node).shape)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments, with a type that is narrower than FX's."""
    return node.args


class Product(NamedTuple):
    """Operands of a product with a weight; `inner` is the weight's input dimension."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inner: int


def product(node: fx.Node) -> Product | None:
    """Return the operands of a product with a weight, or None for any other node."""
    # The weight of `linear` is [out, in]; a Conv1D of transformers calls `addmm`, whose weight is [in, out], and traces
    # by `differentiate` have `mm` with a transposed view.
    if node.target is aten.linear.default:
        x, weight, *bias = operands(node)
        return Product(x, weight, bias[0] if bias else None, 1)
    if node.target is aten.addmm.default:
        bias, x, weight = operands(node)[:3]
        return Product(x, weight, bias, 0)
    if node.target is aten.mm.default:
        x, weight = operands(node)
        return Product(x, weight, None, 0)
    return None


def known_product(node: fx.Node) -> Product:
    """Return the operands of a node that is known to be a product."""
    parts = product(node)
    assert parts is not None, node
    return parts


def sink(node: fx.Node) -> fx.Node | None:
    """Return the attention sinks of an attention call, [Hq], or None if it has none."""
    return operands(node)[10] if node.target is varlen and len(operands(node)) > 10 else None

"""Read one node of a forward graph: its operands, the sizes of its value, and the product that it may be."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

import hydragraph.kernels.varlen_attention  # noqa: F401  registers the operator
from hydragraph.ir.graph_data import value_of

aten = torch.ops.aten
varlen = torch.ops.hydragraph.varlen_attention.default


def shape(node: fx.Node) -> list[Any]:
    """Return the traced sizes of a node's value."""
    return list(value_of(node).shape)


def operands(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments; FX types them too widely to work with."""
    return node.args


class Product(NamedTuple):
    """A product with a weight, taken apart; `inner` is the weight's input dimension."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inner: int


def product(node: fx.Node) -> Product | None:
    """Take a product with a weight apart; None: the node is none."""
    # `linear` has its weight as [out, in]; a Conv1D of transformers calls `addmm`, whose weight is [in, out], and what
    # `differentiate` traces has `mm` with a transposed view.
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
    """Take apart what is known to be a product."""
    parts = product(node)
    assert parts is not None, node
    return parts

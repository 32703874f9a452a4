"""Find a template's head: the product and the loss that one operator can compute together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.passes.vocabulary import MEAN, SUM

aten = torch.ops.aten

# Between the product and the loss: the same numbers in another shape, or exactly as many of them in fp32.
_BETWEEN = frozenset({aten.flatten.using_ints, aten.view.default, aten.reshape.default, aten.to.dtype})


@dataclass(frozen=True)
class Head:
    """A head's nodes: hidden states [..., H], weight [V, H], labels [T], the ignored label, and the loss."""

    hidden: fx.Node
    weight: fx.Node
    labels: fx.Node
    ignored: int
    loss: fx.Node


def find_head(loss: fx.Node) -> Head | None:
    """Return the head that ends in this node, if it is a summed cross-entropy of a product without a bias."""
    if loss.target is not aten.cross_entropy_loss.default:
        return None
    defaults: tuple[Any, ...] = (None, MEAN, -100, 0.0)
    logits, labels, *rest = loss.args
    weight, reduction, ignored, smoothing = tuple(rest) + defaults[len(rest) :]
    if weight is not None or reduction != SUM or smoothing:
        return None
    product = _node(logits)
    while product.target in _BETWEEN and len(product.users) == 1:
        product = _node(product.args[0])
    if product.target is not aten.linear.default or len(product.users) != 1 or any(product.args[2:]):
        return None
    hidden = _node(product.args[0])
    matrix = _node(product.args[1])
    assert isinstance(ignored, int)
    return Head(hidden, matrix, _node(labels), ignored, loss) if _in_fp32(loss, hidden) else None


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _in_fp32(loss: fx.Node, hidden: fx.Node) -> bool:
    """Say whether the loss is computed in fp32 at least, as the operator does; some models keep it in 16 bits."""
    dtype = value_of(loss).dtype
    return bool(dtype == torch.promote_types(value_of(hidden).dtype, torch.float32))

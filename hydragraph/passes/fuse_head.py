"""Pass `fuse_head`: fuse the head's product and the loss into an operator that never materializes the logits.

    hidden [1, T, H] -- linear(weight [V, H]) --> logits [1, T, V] -- view, to fp32 --> [T, V]
                     -- cross_entropy(labels [T], "sum") --> loss []
    becomes
    hidden -- flatten --> [T, H] -- head_loss(weight, labels) --> (loss, and its gradients of hidden and of weight)

Per-token losses, cross_entropy(labels, "none"), become head_token_losses(weight, labels).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import hydragraph.kernels.linear_cross_entropy
import hydragraph.kernels.linear_token_losses  # noqa: F401  registers operators
from hydragraph.ir.graph_data import value_of
from hydragraph.passes.clean import copy_of
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.vocabulary import MEAN, NONE, SUM
from hydragraph.private.module_internals import graph_module

aten = torch.ops.aten
_FUSED = {SUM: torch.ops.hydragraph.head_loss.default, NONE: torch.ops.hydragraph.head_token_losses.default}

_BETWEEN = frozenset({aten.flatten.using_ints, aten.view.default, aten.reshape.default, aten.to.dtype})


@dataclass(frozen=True)
class HeadNodes:
    """Nodes of a head: hidden [..., H], weight [V, H], labels [T], loss."""

    hidden: fx.Node
    weight: fx.Node
    labels: fx.Node
    ignored: int
    reduction: int
    smoothing: float
    loss: fx.Node


def fuse_head(module: fx.GraphModule) -> fx.GraphModule:
    """Fuse the head of a graph with unsharded weights, or return the graph if `find_head` finds none."""
    graph = copy_of(module)
    head = next((h for n in graph.nodes if (h := find_head(n)) is not None), None)
    if head is None:
        return module
    with graph.inserting_before(head.loss):
        flat = graph.call_function(aten.flatten.using_ints, (head.hidden, 0, -2))
        smoothing = (head.smoothing,) if head.smoothing else ()
        arguments = (flat, head.weight, head.labels, head.ignored, *smoothing)
        fused = graph.call_function(_FUSED[head.reduction], arguments)
        loss = graph.call_function(operator.getitem, (fused, 0))
    loss.meta = dict(head.loss.meta)
    head.loss.replace_all_uses_with(loss)
    graph.eliminate_dead_code()
    graph.lint()
    return graph_module(module, graph)


def find_head(loss: fx.Node) -> HeadNodes | None:
    """Return a loss's head, or None if it has unsupported options (class weights, mean, bias)."""
    if loss.target is not aten.cross_entropy_loss.default:
        return None
    defaults: tuple[Any, ...] = (None, MEAN, -100, 0.0)
    logits, labels, *rest = operands(loss)
    weight, reduction, ignored, smoothing = tuple(rest) + defaults[len(rest) :]
    if weight is not None or reduction not in _FUSED or (smoothing and reduction != SUM) or len(shape(labels)) != 1:
        return None
    # Walk from the logits back to the product, unless other nodes read values in between.
    product = logits
    while product.target in _BETWEEN and len(product.users) == 1:
        product = operands(product)[0]
    if product.target is not aten.linear.default or len(product.users) != 1 or any(operands(product)[2:]):
        return None
    hidden, matrix = operands(product)[:2]
    # The fused loss is in fp32, or in fp64 for fp64 inputs.
    fp32 = torch.promote_types(value_of(hidden).dtype, torch.float32)
    if shape(logits)[-1] != shape(matrix)[0] or value_of(loss).dtype != fp32:
        return None
    return HeadNodes(hidden, matrix, labels, ignored, reduction, smoothing, loss)

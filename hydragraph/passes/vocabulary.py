"""Vocabulary-parallel embedding and loss: each rank has some rows of the table and some columns of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
tp_ops = torch.ops.hydragraph

MEAN, SUM = 1, 2  # PyTorch's reduction codes


def embedding_part(graph: fx.Graph, args: tuple[Any, ...], start: fx.Node, rows: int) -> fx.Node:
    """Write the part of an embedding that this rank's rows give: 0 for tokens of other ranks; the sum is the whole.

    Args:
        args: local weight [rows, H], ids [...], and perhaps the padding id, whose row gets no gradient.
        start: 0-d int64, the first row held.
    """
    weight, ids, *rest = args
    local = graph.call_function(aten.sub.Tensor, (ids, start))
    here = _within(graph, local, rows)
    embedded = graph.call_function(
        aten.embedding.default, (weight, graph.call_function(aten.mul.Tensor, (local, here)))
    )
    if rest and rest[0] >= 0:
        learns = graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.ne.Scalar, (ids, rest[0])), -1))
        still = graph.call_function(aten.detach.default, (embedded,))
        embedded = graph.call_function(aten.where.self, (learns, embedded, still))
    return graph.call_function(aten.mul.Tensor, (embedded, graph.call_function(aten.unsqueeze.default, (here, -1))))


def loss_of_parts(graph: fx.Graph, args: tuple[Any, ...], start: fx.Node, columns: int) -> fx.Node:
    """Write the cross-entropy of logits of which this rank has some columns, equal on every rank.

    Args:
        args: local logits [T, columns], labels [T], weight (None), reduction, ignored label.
        start: 0-d int64, the first column held.
    """
    logits, labels = args[:2]
    reduction = args[3] if len(args) > 3 else MEAN
    ignored = args[4] if len(args) > 4 else -100
    call = graph.call_function
    largest = call(tp_ops.tp_max.default, (call(aten.amax.default, (call(aten.detach.default, (logits,)), [-1])),))
    shifted = call(aten.sub.Tensor, (logits, call(aten.unsqueeze.default, (largest, -1))))
    mass = call(aten.sum.dim_IntList, (call(aten.exp.default, (shifted,)), [-1]))
    local = call(aten.sub.Tensor, (labels, start))
    here = _within(graph, local, columns)
    index = call(aten.unsqueeze.default, (call(aten.mul.Tensor, (local, here)), -1))
    target = call(aten.mul.Tensor, (call(aten.squeeze.dim, (call(aten.gather.default, (shifted, 1, index)), -1)), here))
    sums = call(tp_ops.tp_sum.default, (call(aten.stack.default, ([mass, target],)),))  # one message for both
    log_mass = call(aten.log.default, (call(aten.select.int, (sums, 0, 0)),))
    loss = call(aten.sub.Tensor, (log_mass, call(aten.select.int, (sums, 0, 1))))
    counts = call(aten.ne.Scalar, (labels, ignored))
    total = call(aten.sum.default, (call(aten.where.ScalarOther, (counts, loss, 0.0)),))
    if reduction == SUM:
        return total
    assert reduction == MEAN, "per-token losses are refused by the cut analysis"
    return call(aten.div.Tensor, (total, call(aten.sum.default, (counts,))))


def _within(graph: fx.Graph, local: fx.Node, size: int) -> fx.Node:
    at_least = graph.call_function(aten.ge.Scalar, (local, 0))
    return graph.call_function(aten.logical_and.default, (at_least, graph.call_function(aten.lt.Scalar, (local, size))))

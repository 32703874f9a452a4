"""Vocabulary-parallel embedding and loss: each rank has some rows of the table and some columns of the logits.

In an embedding, each rank looks up the tokens whose rows it has and uses zeros for other tokens, and the ranks sum the
results. The loss of a token with logits z and label y is log(sum_v exp(z_v - m)) - (z_y - m), where m is the largest
logit. Ranks exchange m, and two numbers per token: their columns' part of the sum, and z_y - m on the rank with column
y (Shoeybi et al., "Megatron-LM", section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
tp_ops = torch.ops.hydragraph

NONE, MEAN, SUM = 0, 1, 2


def embedding_part(graph: fx.Graph, args: tuple[Any, ...], start: fx.Node, rows: int) -> fx.Node:
    """Add nodes for this rank's part of an embedding.

    Args:
        args: local weight [rows, H], ids [...], and optionally the padding id, whose row gets no gradient.
        start: first row of this rank's shard (0-d int64).
    """
    weight, ids, *rest = args
    call = graph.call_function
    # If another rank has the row, look up row 0, times 0.
    local = call(aten.sub.Tensor, (ids, start))
    here = _within(graph, local, rows)
    embedded = call(aten.embedding.default, (weight, call(aten.mul.Tensor, (local, here))))
    # The padding row is read, but does not learn.
    if rest and rest[0] >= 0:
        learns = call(aten.unsqueeze.default, (call(aten.ne.Scalar, (ids, rest[0])), -1))
        embedded = call(aten.where.self, (learns, embedded, call(aten.detach.default, (embedded,))))
    return call(aten.mul.Tensor, (embedded, call(aten.unsqueeze.default, (here, -1))))


def loss_of_parts(graph: fx.Graph, args: tuple[Any, ...], start: fx.Node, columns: int, classes: int) -> fx.Node:
    """Add nodes for the cross-entropy, equal on all ranks, of logits with sharded columns.

    Args:
        args: local logits [T, columns], labels [T], class weights (None), reduction, ignored label, label smoothing.
        classes: number of columns over all ranks.
    """
    logits, labels = args[:2]
    reduction = args[3] if len(args) > 3 else MEAN
    ignored = args[4] if len(args) > 4 else -100
    smoothing = args[5] if len(args) > 5 else 0.0
    call = graph.call_function
    # m cancels in the loss, so it has no gradient.
    largest = call(tp_ops.tp_max.default, (call(aten.amax.default, (call(aten.detach.default, (logits,)), [-1])),))
    shifted = call(aten.sub.Tensor, (logits, call(aten.unsqueeze.default, (largest, -1))))
    mass = call(aten.sum.dim_IntList, (call(aten.exp.default, (shifted,)), [-1]))
    # `target` is z_y - m if this rank has column y, else 0.
    local = call(aten.sub.Tensor, (labels, start))
    here = _within(graph, local, columns)
    # Other ranks' and ignored labels read column 0, times 0.
    index = call(aten.unsqueeze.default, (call(aten.mul.Tensor, (local, here)), -1))
    target = call(aten.mul.Tensor, (call(aten.squeeze.dim, (call(aten.gather.default, (shifted, 1, index)), -1)), here))
    if smoothing:
        # Smoothing mixes z_y - m with the mean over all classes.
        every = call(aten.mul.Tensor, (call(aten.sum.dim_IntList, (shifted, [-1])), smoothing / classes))
        target = call(aten.add.Tensor, (call(aten.mul.Tensor, (target, 1.0 - smoothing)), every))
    # Stacked [2, T], both need one all-reduce.
    sums = call(tp_ops.tp_sum.default, (call(aten.stack.default, ([mass, target],)),))
    log_mass = call(aten.log.default, (call(aten.select.int, (sums, 0, 0)),))
    loss = call(aten.sub.Tensor, (log_mass, call(aten.select.int, (sums, 0, 1))))
    counts = call(aten.ne.Scalar, (labels, ignored))
    losses = call(aten.where.ScalarOther, (counts, loss, 0.0))
    if reduction == NONE:
        return losses
    total = call(aten.sum.default, (losses,))
    if reduction == SUM:
        return total
    return call(aten.div.Tensor, (total, call(aten.sum.default, (counts,))))


def entropy_of_parts(graph: fx.Graph, args: tuple[Any, ...], start: fx.Node, columns: int) -> fx.Node:
    """Add nodes for each token's entropy, equal on all ranks.

    Args:
        args: local logits [T, columns], labels [T], ignored label.
    """
    logits, labels, ignored = args
    call = graph.call_function
    largest = call(tp_ops.tp_max.default, (call(aten.amax.default, (logits, [-1])),))
    shifted = call(aten.sub.Tensor, (logits, call(aten.unsqueeze.default, (largest, -1))))
    exponential = call(aten.exp.default, (shifted,))
    # Clamp logits: 0 times -inf would be NaN.
    finite = call(aten.clamp.default, (shifted, -1e30))
    mass, weighted = (
        call(aten.sum.dim_IntList, (part, [-1])) for part in (exponential, call(aten.mul.Tensor, (exponential, finite)))
    )
    sums = call(tp_ops.tp_sum.default, (call(aten.stack.default, ([mass, weighted],)),))
    whole, mean = (call(aten.select.int, (sums, 0, i)) for i in (0, 1))
    entropy = call(aten.sub.Tensor, (call(aten.log.default, (whole,)), call(aten.div.Tensor, (mean, whole))))
    return call(aten.where.ScalarOther, (call(aten.ne.Scalar, (labels, ignored)), entropy, 0.0))


def _within(graph: fx.Graph, local: fx.Node, size: int) -> fx.Node:
    at_least = graph.call_function(aten.ge.Scalar, (local, 0))
    return graph.call_function(aten.logical_and.default, (at_least, graph.call_function(aten.lt.Scalar, (local, size))))

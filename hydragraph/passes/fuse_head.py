"""Pass `fuse_head`: the head's product and the loss become one operator, so that the logits never exist as a whole.

It applies where a rank has the whole vocabulary. Where that is cut, `shard` writes the operator itself, because the
loss of parts is no single node that could be found afterwards.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from hydragraph.kernels.linear_cross_entropy import head_loss
from hydragraph.passes.head import find_head
from hydragraph.passes.shard import Sharded

aten = torch.ops.aten


def fuse_head(sharded: Sharded) -> Sharded:
    """Return the same with the operator in place of head and loss; unchanged where it does not find these two."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(sharded.graph.graph, {}))
    head = next((h for n in graph.nodes if (h := find_head(n)) is not None), None)
    if head is None:
        return sharded
    with graph.inserting_before(head.loss):
        flat = graph.call_function(aten.flatten.using_ints, (head.hidden, 0, -2))
        fused = graph.call_function(head_loss._opoverload, (flat, head.weight, head.labels, head.ignored))
        loss = graph.call_function(operator.getitem, (fused, 0))
    loss.meta = dict(head.loss.meta)
    head.loss.replace_all_uses_with(loss)
    graph.eliminate_dead_code()
    graph.lint()
    return replace(sharded, graph=fx.GraphModule(sharded.graph, graph))

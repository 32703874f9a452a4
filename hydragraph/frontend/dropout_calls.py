"""Dropout in traced graphs, with random numbers computed from a key per token.

`number_calls` numbers the calls of dropout before nodes are reordered or removed. `add_keys` adds their inputs:

    dropout_keys    [1, T, 2] int64, a field of the packed batch (`hydragraph.kernels.philox`)
    dropout_block   0-d int64, the number of the block
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.added_inputs import added_input
from hydragraph.frontend.token_axes import symbolic_dims
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import DROPOUT_BLOCK, DROPOUT_KEYS
from hydragraph.passes.clean import AUTOCAST, GRAD_MODE, region
from hydragraph.passes.graph_node import ATTENDING, DRAWN, attention_dropout, dropout, operands, shape

aten = torch.ops.aten

# Position of `attention_dropout`'s call number
_CALL = 11
INPUTS = {name: name for name in (DROPOUT_KEYS, DROPOUT_BLOCK)}


def number_calls(graph: fx.GraphModule, where: str) -> None:
    """Replace PyTorch's dropout with hydragraph's, and number the calls in order."""
    numbers = itertools.count()

    def visit(module: fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if GRAD_MODE in str(node.target) or AUTOCAST in str(node.target):
                visit(region(module, node)[0])
            elif node.target is attention_dropout:
                node.update_arg(_CALL, next(numbers))
            elif node.target in (aten.dropout.default, aten.dropout_.default):
                _replace(module.graph, node, numbers, where)
        module.recompile()

    visit(graph)


def _replace(graph: fx.Graph, node: fx.Node, numbers: Iterator[int], where: str) -> None:
    x, p, train = operands(node)
    if not train or p == 0:
        return
    options = (float(p), next(numbers), _token_dim(x, where), 0, 0, 1)
    with graph.inserting_before(node):
        drawn = graph.call_function(dropout, (x, None, None, None, *options))
        drawn.meta = dict(node.meta)
        if node.target is aten.dropout_.default:
            drawn = graph.call_function(aten.copy_.default, (x, drawn))
            drawn.meta = dict(node.meta)
    node.replace_all_uses_with(drawn)
    graph.erase_node(node)


def _token_dim(x: fx.Node, where: str) -> int:
    dims = symbolic_dims(x)
    if len(dims) != 1 or dims[0] == len(shape(x)) - 1:
        what = (
            f"dropout is applied to a value of shape {list(map(str, shape(x)))}, which "
            "is not one token dimension followed by features"
        )
        remedy = "set that dropout probability to 0, or apply dropout to values with one row per token"
        raise Unsupported(what, where=where, remedy=remedy)
    return dims[0]


def add_keys(graph: fx.GraphModule) -> None:
    calls = [n for n in graph.graph.nodes if n.target in DRAWN]
    if not calls:
        return
    first: Any = value_of(operands(calls[0])[0])
    tokens = first.shape[0 if calls[0].target in ATTENDING else operands(calls[0])[6]]
    block = added_input(graph.graph, DROPOUT_BLOCK, lambda: first.new_empty((), dtype=torch.int64))
    keys = added_input(graph.graph, DROPOUT_KEYS, lambda: first.new_empty((1, tokens, 2), dtype=torch.int64))
    for node in calls:
        at = 7 if node.target in ATTENDING else 1
        node.args = (*node.args[:at], keys, block, *node.args[at + 2 :])

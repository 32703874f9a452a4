"""Pass `sums_in_pieces`: split products into pieces along the tokens, and all-reduce each piece separately.

    before     u = x W;  s = all_reduce(u)
    after      s = all_reduce_product([x], [W])

The runtime starts the all-reduce of each piece before it computes the next piece. Sums of products are also split, such
as u = x W + y V.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.passes.collective_operators import SUMMED
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.operator_rules import SIZED_VIEWS
from hydragraph.private.module_internals import graph_module

aten = torch.ops.aten


def sums_in_pieces(variant: Variant) -> Variant:
    return replace(variant, forward=_in_pieces(variant.forward), backward=_in_pieces(variant.backward))


def _in_pieces(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        products = _products(operands(node)[1]) if node.target == "all_reduce" else None
        if products is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        factors = ([copies[operands(product)[i]] for product in products] for i in range(2))
        copies[node] = graph.call_method(SUMMED, (copies[operands(node)[0]], *factors))
        copies[node].meta = dict(node.meta)
        # The runtime sums [T, N]; readers expect [1, T, N].
        if len(shape(node)) == 3:
            copies[node].meta["val"] = value_of(node)[0]
            copies[node] = graph.call_function(aten.unsqueeze.default, (copies[node], 0))
            copies[node].meta = dict(node.meta)
    # Erase what only replaced sums read, readers first.
    for node in reversed(module.graph.nodes):
        if node.op != "placeholder" and node.users and not copies[node].users:
            graph.erase_node(copies[node])
    graph.lint()
    return graph_module(module, graph)


def _products(node: fx.Node) -> list[fx.Node] | None:
    if len(node.users) > 1:
        return None
    if node.target is aten.mm.default:
        return [node]
    if node.target in SIZED_VIEWS and len(shape(node)) == 3 and shape(node)[0] == 1:
        source = operands(node)[0]
        return _products(source) if [str(s) for s in shape(source)] == [str(s) for s in shape(node)[1:]] else None
    if node.target is aten.add.Tensor and not node.kwargs:
        parts = [_products(part) if isinstance(part, fx.Node) else None for part in operands(node)]
        return None if None in parts else [product for part in parts for product in part or ()]
    return None

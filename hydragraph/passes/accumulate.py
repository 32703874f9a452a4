"""Pass `accumulate`: fuse the matrix product of a weight gradient with the addition to the gradient sum.

    before     dW = mm(dy^t, x)         returned; the executor computes total += dW
    after      total.addmm_(dy^t, x, beta=beta)

The fusion saves two thirds of a gradient's memory traffic. `beta` is 0 for the first micro-batch and 1 for later ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.differentiate import Variant
from hydragraph.private.module_internals import graph_module

aten = torch.ops.aten


def accumulate(variant: Variant) -> Variant:
    if not variant.gradients:
        return variant
    graph = fx.Graph()
    results: Any = graph.graph_copy(variant.backward.graph, {})
    # The hidden state's gradient is not added to a sum.
    gradients = dict(zip(variant.gradients, results, strict=True))
    # The output must count as a user of each gradient.
    graph.output(results)
    products = {
        n: product for n, node in gradients.items() if n != "hidden" and (product := _product(node)) is not None
    }
    # New inputs follow the others, in pairs: total_0, beta_0, total_1, beta_1.
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for i, (name, product) in enumerate(products.items()):
        last = _add(graph, last, i, gradients[name], *product)
    # Fused products have no readers, so they are dead code; `addmm_` is impure.
    kept = {name: node for name, node in gradients.items() if name not in products}
    graph.output_node().args = (tuple(kept.values()),)
    remove_dead_code(graph)
    return replace(
        variant, backward=graph_module(variant.backward, graph), gradients=tuple(kept), added=tuple(products)
    )


def _product(node: fx.Node) -> tuple[fx.Node, bool] | None:
    transposed = False
    # Walk from the gradient back through transposes, up to a value with a second reader, which must
    # be computed separately.
    while len(node.users) == 1:
        if node.target is aten.mm.default:
            return node, transposed
        if node.target is not aten.t.default:
            return None
        (node,) = node.all_input_nodes
        transposed = not transposed
    return None


def _add(graph: fx.Graph, last: fx.Node, number: int, gradient: fx.Node, product: fx.Node, transposed: bool) -> fx.Node:
    with graph.inserting_after(last):
        total = graph.placeholder(f"total_{number}")
    total.meta = dict(gradient.meta)
    with graph.inserting_after(total):
        beta = graph.placeholder(f"beta_{number}")
    with graph.inserting_before(product):
        # A transposed product is added to a transposed view.
        into = graph.call_method("t", (total,)) if transposed else total
        graph.call_method("addmm_", (into, *product.args), {"beta": beta})
    return beta

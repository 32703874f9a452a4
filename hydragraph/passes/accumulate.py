"""Pass `accumulate`: the product that makes a weight's gradient adds it to those of earlier micro-batches.

Otherwise the product writes a matrix of its own, and a sum reads two and writes one: for every micro-batch three times
the weights in traffic, and the memory of a second gradient.

    before     dW = mm(dy^t, x)         returned; the executor computes total += dW
    after      total.addmm_(dy^t, x, beta=beta)

`total` is the buffer that the gradients of all micro-batches are summed in, `beta` 1, or 0 for the first of them, so
that what lies in the buffer does not count. Of a transposed gradient, dW = t(mm(a, b)), `total` is transposed instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hydragraph.passes.differentiate import Variant

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """A gradient that is a matrix product, perhaps transposed."""

    node: fx.Node
    transposed: bool


def accumulate(variant: Variant) -> Variant:
    """Return a variant whose backward adds the gradients of `added` to what it is given, and returns the others.

    A gradient qualifies if it is a matrix product, perhaps transposed, that nothing else reads: as linear layers give
    it, where no collective and no other sum follows.
    """
    if not variant.gradients:
        return variant
    graph = fx.Graph()
    results: Any = graph.graph_copy(variant.backward.graph, {})
    # The hidden state's gradient goes to the stage before, once per micro-batch: nothing to add up.
    gradients = dict(zip(variant.gradients, results, strict=True))
    # With the output in the graph, a gradient that only it returns has exactly one user.
    graph.output(results)
    products = {
        n: product for n, node in gradients.items() if n != "hidden" and (product := _product(node)) is not None
    }
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for i, (name, product) in enumerate(products.items()):
        last = _add(graph, last, i, gradients[name], product)
    kept = {name: node for name, node in gradients.items() if name not in products}
    next(n for n in graph.nodes if n.op == "output").args = (tuple(kept.values()),)
    _drop_unread(graph)
    return replace(
        variant, backward=fx.GraphModule(variant.backward, graph), gradients=tuple(kept), added=tuple(products)
    )


def _product(node: fx.Node) -> _Product | None:
    """Return the matrix product that a gradient is; None if it is something else, or read by something else too."""
    # Back from the result through transposes; a second reader would miss the product's own value.
    transposed = False
    while len(node.users) == 1:
        if node.target is aten.mm.default:
            return _Product(node, transposed)
        if node.target is not aten.t.default:
            return None
        (node,) = node.all_input_nodes
        transposed = not transposed
    return None


def _add(graph: fx.Graph, last: fx.Node, number: int, gradient: fx.Node, product: _Product) -> fx.Node:
    """Let a product add to a new placeholder behind the last one; return that of what its content counts."""
    with graph.inserting_after(last):
        total = graph.placeholder(f"total_{number}")
    total.meta = dict(gradient.meta)
    with graph.inserting_after(total):
        beta = graph.placeholder(f"beta_{number}")
    with graph.inserting_before(product.node):
        into = graph.call_method("t", (total,)) if product.transposed else total
        graph.call_method("addmm_", (into, *product.node.args), {"beta": beta})
    return beta


def _drop_unread(graph: fx.Graph) -> None:
    """Drop what only the returned gradients needed, but not the products."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node.target != "addmm_" and not node.users:
            graph.erase_node(node)
    graph.lint()

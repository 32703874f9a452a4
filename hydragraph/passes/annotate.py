"""Pass `annotate`: put Communicate-Activation placeholders into a template wherever tensor parallelism may cut it.

    norm -> x                     x is whole, and each rank's part of the products gives a part of its gradient
    communicate(x, "enter")       so here, in the backward, the parts are added up
    q, k, v, attention            cut by heads
    linear(a, Wo) -> y            each rank has a part of a sum
    communicate(y, "exit")        so here, in the forward, the parts are added up
    hidden + y

The placeholders are for no degree yet: `shard` makes collectives of them, or nothing for a degree of 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.passes.graph_node import product
from hydragraph.passes.tensor_cut import Cuts

aten = torch.ops.aten


def annotate(graph: fx.GraphModule, cuts: Cuts, parameters: set[fx.Node], hidden: fx.Node | None) -> fx.GraphModule:
    """Return a copy with `communicate(x, "enter")` and `communicate(y, "exit")` around what may be cut.

    "enter" stands before every use, by an operator with a cut result, of a replicated value that gets a gradient: that
    gradient is then the sum over ranks. "exit" stands after every product that adds parts up. A parameter used whole
    by cut operators needs no placeholder (its gradient is partial and is summed at the push), unless operators on
    replicated values use it too.
    """
    # `entered`: one placeholder per value, however many cut operators use it: its gradient is summed once.
    result = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    entered: dict[fx.Node, fx.Node] = {}
    learns = differentiable(graph.graph, parameters, hidden)
    cut_users = set(cuts.cut) | cuts.columns
    mixed = {p for p in parameters if p not in cuts.cut and _mixed(p, cut_users, cuts)}

    def entering(node: fx.Node) -> fx.Node:
        if node not in entered:
            entered[node] = _insert(result, copied[node], "enter")
        return entered[node]

    for node in graph.graph.nodes:
        if node.op == "output":
            result.output(fx.node.map_arg(node.args[0], lambda n: copied[n]))
            continue
        # What gets no gradient needs no sum of it. A parameter's is summed at the push, unless operators on whole
        # values use it, too: their gradient is whole on every rank, and that of the cut ones must be before they meet.
        whole = _whole_operands(node, cuts) if node in cut_users else set()
        enter = {n for n in whole if n in learns and (n not in parameters or n in mixed)}
        operand = {n: entering(n) if n in enter else copied[n] for n in node.all_input_nodes}
        copied[node] = result.node_copy(node, operand.__getitem__)
        # A vocabulary-parallel loss adds its parts up itself (`hydragraph.passes.vocabulary`).
        if node in cuts.rows and node.target is not aten.cross_entropy_loss.default:
            copied[node] = _insert(result, copied[node], "exit")
    result.lint()
    return fx.GraphModule(graph, result)


def differentiable(graph: fx.Graph, parameters: set[fx.Node], hidden: fx.Node | None) -> set[fx.Node]:
    """Return the nodes whose values depend on a parameter or the hidden state, and so get a gradient."""
    # Forwards through the graph: `detach` ends it, and so does what is computed in integers.
    learning = parameters | ({hidden} if hidden is not None else set())
    for node in graph.nodes:
        depends = any(n in learning for n in node.all_input_nodes)
        if depends and node.target is not aten.detach.default and _is_float(node):
            learning.add(node)
    return learning


def _is_float(node: fx.Node) -> bool:
    value: Any = value_of(node)
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, tuple | list)


def _whole_operands(node: fx.Node, cuts: Cuts) -> set[fx.Node]:
    """Return the operands of a cut operator that every rank uses whole."""
    # Of a column-parallel product, weight and bias are cut with it; only its operand x is whole.
    operands = {n for n in node.all_input_nodes if n not in cuts.cut}
    parts = product(node) if node in cuts.columns else None
    return operands - {parts[1], parts[2]} if parts else operands


def _mixed(parameter: fx.Node, cut_users: set[fx.Node], cuts: Cuts) -> bool:
    # Products cut their weights or add them up; of what is left, some use a part of the parameter and some all of it.
    products = cuts.columns | set(cuts.rows)
    users = [u for u in parameter.users if u not in products]
    return any(u in cut_users for u in users) and any(u not in cut_users for u in users)


def _insert(graph: fx.Graph, value: fx.Node, where: str) -> fx.Node:
    node = graph.call_function(communicate, (value, where))
    node.meta = dict(value.meta)
    return node

"""Pass `annotate`: insert `communicate` around the regions of a template that tensor parallelism may shard.

    norm -> x                     replicated, but each rank computes a partial gradient of x
    communicate(x, "enter")       the backward sums the partial gradients here
    q, k, v, attention            sharded by heads
    linear(a, Wo) -> y            a partial sum on each rank
    communicate(y, "exit")        the forward sums the partial sums here

Experts compute several rows per token, so "enter" precedes the copy of tokens to rows, and "exit" follows the sum of
each token's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.graph_node import is_grouped, operands, product
from hydragraph.passes.operator_rules import MOVES, VIEWS
from hydragraph.passes.tensor_cut import Cuts
from hydragraph.private.module_internals import graph_module

aten = torch.ops.aten

_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
# Operators linear in their first operand.
_LINEAR = VIEWS | MOVES | {aten.sum.dim_IntList, aten.div.Tensor, aten.clone.default, aten.contiguous.default}


def annotate(graph: fx.GraphModule, cuts: Cuts, parameters: set[fx.Node], hidden: fx.Node | None) -> fx.GraphModule:
    # Insert one `communicate` per value, so that its gradient is summed once.
    result = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    entered: dict[fx.Node, fx.Node] = {}
    # learns: nodes that get a gradient. unsummed: partial sums that still need an "exit". mixed:
    # parameters read by both sharded and unsharded operators.
    learns = differentiable(graph.graph, parameters, hidden)
    partial = partial_sums(graph.graph, cuts)
    unsummed = partial | cuts.rows.keys()
    cut_users = set(cuts.cut) | cuts.columns | partial
    mixed = {p for p in parameters if p not in cuts.cut and _mixed(p, cut_users, cuts)}

    def entering(node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        if node not in entered:
            # If only sharded operators read these rows, "enter" precedes the copy, so that the
            # backward sums tokens, not rows.
            if node not in partial and _spreads(node) and all(u in cut_users or u is reader for u in node.users):
                entered[node] = result.node_copy(node, lambda n: entering(n, node) if n in learns else copied[n])
            else:
                entered[node] = _insert(result, copied[node], "enter")
        return entered[node]

    for node in graph.graph.nodes:
        if node.op == "output":
            result.output(fx.node.map_arg(node.args[0], lambda n: copied[n]))
            continue
        # Pushes sum partial gradients, so only parameters that also get whole ones (`mixed`) need
        # "enter".
        whole = _whole_operands(node, cuts) - unsummed if node in cut_users else set()
        enter = {n for n in whole if n in learns and (n not in parameters or n in mixed)}
        operand = {n: entering(n) if n in enter else copied[n] for n in node.all_input_nodes}
        copied[node] = result.node_copy(node, operand.__getitem__)
        # The last of several partial sums gets "exit". A sharded loss sums its own parts.
        if node in unsummed and not any(user in partial for user in node.users):
            unsummed.remove(node)
            if node.target is not aten.cross_entropy_loss.default:
                copied[node] = _insert(result, copied[node], "exit")
    remove_dead_code(result)
    return graph_module(graph, result)


def partial_sums(graph: fx.Graph, cuts: Cuts) -> set[fx.Node]:
    """Return the nodes between experts' row-parallel products and "exit"."""
    partial: set[fx.Node] = set()
    for node in graph.nodes:
        sources = [n for n in node.all_input_nodes if n in partial or (n in cuts.rows and is_grouped(n))]
        # "exit" can pass a linear operator, unless another node reads its operand.
        if len(sources) == 1 and len(sources[0].users) == 1 and _is_linear(node, sources[0], cuts):
            partial.add(node)
    return partial


def _is_linear(node: fx.Node, operand: fx.Node, cuts: Cuts) -> bool:
    # A parameter combined with a partial sum would get a partial gradient.
    if any(n in cuts.cut or n.op == "placeholder" for n in node.all_input_nodes):
        return False
    first = operands(node)[0]
    # x * x is not linear in x.
    if node.target is aten.mul.Tensor:
        return operands(node).count(operand) == 1
    # index_add(zeros, dim, index, rows) is linear in rows.
    if node.target is aten.index_add.default:
        return operand is operands(node)[3] and first.target in _ZEROS
    return operand is first and (_chooses_rows(node) or node.target in _LINEAR)


def _spreads(node: fx.Node) -> bool:
    if _chooses_rows(node) or node.target is aten.repeat.default:
        return True
    inputs = node.all_input_nodes
    passed_on = node.target in VIEWS or (node.target is aten.mul.Tensor and all(n.op != "placeholder" for n in inputs))
    return passed_on and any(map(_spreads, inputs))


def _chooses_rows(node: fx.Node) -> bool:
    return node.target in (aten.index.Tensor, aten.index_select.default)


def differentiable(graph: fx.Graph, parameters: set[fx.Node], hidden: fx.Node | None) -> set[fx.Node]:
    learning = parameters | ({hidden} if hidden is not None else set())
    for node in graph.nodes:
        depends = any(n in learning for n in node.all_input_nodes)
        if depends and node.target is not aten.detach.default and _is_float(node):
            learning.add(node)
    return learning


def _is_float(node: fx.Node) -> bool:
    value: Any = value_of(node)
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, (tuple, list))


def _whole_operands(node: fx.Node, cuts: Cuts) -> set[fx.Node]:
    operands = {n for n in node.all_input_nodes if n not in cuts.cut}
    parts = product(node) if node in cuts.columns else None
    return operands - {parts.given, parts.bias} if parts else operands


def _mixed(parameter: fx.Node, cut_users: set[fx.Node], cuts: Cuts) -> bool:
    products = cuts.columns | set(cuts.rows)
    users = [u for u in parameter.users if u not in products]
    return any(u in cut_users for u in users) and any(u not in cut_users for u in users)


def _insert(graph: fx.Graph, value: fx.Node, where: str) -> fx.Node:
    node = graph.call_function(communicate, (value, where))
    node.meta = dict(value.meta)
    return node

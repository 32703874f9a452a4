"""Memory budgets: selection of values that are recomputed in the backward instead of saved.

First, the partitioner "min_cut" selects storages to save. Then, until these are within the budget, the storage that is
cheapest to recompute per byte is dropped. Inputs and results of the forward do not count. Values stay saved if
recomputing them needs attention, collectives or random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import fx

from hydragraph.ir.graph_data import results_of, storages_of, value_of
from hydragraph.private.graph_values import TensorForm
from hydragraph.private.tracing import ancestors_of, draws, hint_of

# operator -> index of the operand whose last dimension is summed over
_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
# Operators that the backward may run again
_LOCAL = frozenset(
    {torch.ops.hydragraph.dropout.default, torch.ops.hydragraph.tp_enter.default, torch.ops.hydragraph.tp_split.default}
)
# Matrix-product operations in the time of moving an element, at 3e14 operations/s and 2e12 bytes/s.
PER_ELEMENT = 600


def within_budget(joint: fx.GraphModule, outputs: int, saved: Collection[str], budget: float) -> list[str]:
    """Return the names of the values that stay saved.

    Args:
        joint: joint graph, whose first `outputs` results are the forward's.
    """
    results = results_of(joint)
    forward = ancestors_of(results[:outputs])
    gradients = [node for node in results[outputs:] if isinstance(node, fx.Node)]
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    # free: storages that exist anyway. kept: saved node -> its other storages. sizes: storage ->
    # bytes. dropped: storages to recompute, in order of choice.
    free = {key for node in [*inputs, *results[:outputs]] for key, _ in storages_of(node)}
    kept = {node: {key for key, _ in storages_of(node)} - free for node in joint.graph.nodes if node.name in saved}
    sizes = {key: _bytes(form) for node in kept for key, form in storages_of(node) if key not in free}
    room = budget * sum(sizes.values())
    dropped: list[int] = []
    cost = _cost(gradients, _without(kept, dropped), forward)
    while sum(sizes.values()) - sum(sizes[key] for key in dropped) > room:
        # In graph order, all processes choose the same of equally cheap storages.
        costs = {key: _cost(gradients, _without(kept, [*dropped, key]), forward) for key in sizes if key not in dropped}
        cheapest = min(costs, key=lambda key: (costs[key] - cost) / sizes[key])
        if math.isinf(costs[cheapest]):
            break
        cost = costs[cheapest]
        dropped.append(cheapest)
    # The last drop may have freed too much, so keep earlier choices that fit again.
    for key in reversed(dropped):
        saved_bytes = sum(sizes.values()) - sum(sizes[other] for other in dropped)
        if saved_bytes + sizes[key] <= room:
            dropped.remove(key)
    return [node.name for node in _without(kept, dropped)]


def _without(kept: dict[fx.Node, set[int]], dropped: Collection[int]) -> list[fx.Node]:
    return [node for node, keys in kept.items() if keys.isdisjoint(dropped)]


def _cost(gradients: Iterable[fx.Node], kept: Collection[fx.Node], forward: Collection[fx.Node]) -> float:
    # Forward nodes between the gradients and kept values or inputs run again.
    cost = 0.0
    pending = list(gradients)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node in kept or node.op == "placeholder":
            continue
        if node in forward:
            cost += operations(node)
        unseen = [input_node for input_node in node.all_input_nodes if input_node not in seen]
        seen.update(unseen)
        pending += unseen
    return cost


def operations(node: fx.Node) -> float:
    """Return a node's recomputation cost in matrix-product operations; inf if it must not run again."""
    if draws(node) or (str(node.target).startswith("hydragraph.") and node.target not in _LOCAL):
        return math.inf
    output_elements = sum(_elements(form) for _, form in storages_of(node))
    if node.target in _PRODUCTS:
        operand = node.args[_PRODUCTS[node.target]]
        return 2.0 * output_elements * hint_of(value_of(operand).shape[-1])
    # A view moves no data.
    viewed = {key for input_node in node.all_input_nodes for key, _ in storages_of(input_node)}
    moved = [form for key, form in storages_of(node) if key not in viewed]
    return float(PER_ELEMENT * sum(map(_elements, moved)))


def _elements(form: TensorForm) -> int:
    return math.prod(hint_of(size) for size in form.sizes)


def _bytes(form: TensorForm) -> int:
    return _elements(form) * form.dtype.itemsize

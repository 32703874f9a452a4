"""Graph inputs for batch fields that the model does not pass to its blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

# Placeholder name -> batch field. Added placeholders follow a block's own arguments, in this order.
ADDED = {"added_positions": "position_ids", "added_bounds": "cu_seqlens", "added_longest": "max_length"}


def added_input(graph: fx.Graph, name: str, value: Callable[[], Tensor]) -> fx.Node:
    """Return the placeholder `name`; if it is missing, add it with the fake value `value()`."""
    placeholders: dict[str, fx.Node] = {node.name: node for node in graph.find_nodes(op="placeholder")}
    if name not in placeholders:
        with graph.inserting_after([*placeholders.values()][-1]):
            placeholders[name] = graph.placeholder(name)
        placeholders[name].meta["val"] = value()
    return placeholders[name]

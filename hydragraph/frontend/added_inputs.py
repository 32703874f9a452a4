"""Fields of the packed batch that a part of a model gets although the model does not pass them to it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

# Placeholder -> field. A block has them after all its arguments, in this order.
ADDED = {"added_positions": "position_ids", "added_bounds": "cu_seqlens", "added_longest": "max_length"}


def added_input(graph: fx.Graph, name: str, value: Callable[[], Tensor]) -> fx.Node:
    """Return the placeholder of a field, and make it, with a fake value, if there is none yet."""
    placeholders: list[fx.Node] = graph.find_nodes(op="placeholder")  # type: ignore[assignment]
    given = next((node for node in placeholders if node.name == name), None)
    if given is None:
        with graph.inserting_after(placeholders[-1]):
            given = graph.placeholder(name)
        given.meta["val"] = value()
    return given

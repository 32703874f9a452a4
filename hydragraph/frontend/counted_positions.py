"""Replacement of `torch.arange(T)` by `position_ids`, unless it selects rows."""

from __future__ import annotations

import torch
from torch import fx

from hydragraph.frontend.added_inputs import added_input
from hydragraph.frontend.functional_graph import insert
from hydragraph.frontend.token_axes import token_dims
from hydragraph.frontend.token_order import ARANGES, SAME, counts_up
from hydragraph.ir.graph_data import value_of
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.graph_node import operands, shape
from hydragraph.private.operator_schemas import aten_operators
from hydragraph.private.tracing import symbol_name

aten = torch.ops.aten

# Operators that select one operand's rows by another.
_CHOOSING = aten_operators("index.Tensor index_put index_select gather scatter.src index_add scatter_add")


def use_position_ids(graph: fx.Graph, tokens: str, given: fx.Node | None = None) -> None:
    """Replace each `arange` over a row's tokens with position ids.

    Args:
        given: node with the positions, [1, T] int64; None adds a graph input.
    """
    aranges = (n for n in graph.nodes if n.target in ARANGES and counts_up(n) and symbol_name(shape(n)[0]) == tokens)
    counters = [n for n in aranges if not _chooses_rows(n, tokens)]
    for node in counters:
        positions = given or added_input(graph, "added_positions", lambda: value_of(counters[0]).long().unsqueeze(0))
        row = insert(node, aten.squeeze.dim, positions, 0)
        if value_of(row).dtype is not value_of(node).dtype:
            row = insert(node, aten.to.dtype, row, value_of(node).dtype)
        node.replace_all_uses_with(row)
    remove_dead_code(graph)


def _chooses_rows(node: fx.Node, tokens: str) -> bool:
    # x[arange(T), experts] needs row numbers, not positions in sequences.
    choosing = [user for user in node.users if user.target in _CHOOSING]
    chooses = any(token_dims(operands(user)[0], tokens) for user in choosing)
    return chooses or any(_chooses_rows(user, tokens) for user in node.users if user.target in SAME)

"""Conversion of PyTorch's attention over a whole row to attention within packed sequences.

Calls with a mask or dropout stay unchanged, and `token_mixing` rejects them.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from hydragraph.frontend.added_inputs import added_input
from hydragraph.frontend.functional_graph import insert
from hydragraph.ir.graph_data import value_of
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.graph_node import operands, shape, varlen
from hydragraph.private.operator_schemas import argument_of
from hydragraph.private.tracing import fake_mode_of, new_symbol, symbol_name

aten = torch.ops.aten

# Length of cu_seqlens in the traced example
_BOUNDS = 3


def use_packed_sequences(graph: fx.Graph, tokens: str) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if argument_of(node, "attn_mask") is None and not argument_of(node, "dropout_p") and _over_row(node, tokens):
            _replace(graph, node)
    remove_dead_code(graph)


def _over_row(node: fx.Node, tokens: str) -> bool:
    sizes = [shape(x) for x in operands(node)[:3]]
    widths = {str(size[-1]) for size in sizes}
    rows = all(symbol_name(size[-2]) == tokens and all(n == 1 for n in size[:-3]) for size in sizes)
    return len(widths) == 1 and min(map(len, sizes)) > 2 and rows


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    query, _, value = operands(node)[:3]
    fake = value_of(query)

    def starts() -> Tensor:
        size = new_symbol(fake_mode_of([fake]), 0, _BOUNDS)
        bounds: Tensor = fake.new_empty((size,), dtype=torch.int32)
        return bounds

    bounds = added_input(graph, "added_bounds", starts)
    longest = added_input(graph, "added_longest", lambda: fake.new_empty((), dtype=torch.int64))
    scale = argument_of(node, "scale")
    settings = (bool(argument_of(node, "is_causal")), shape(query)[-1] ** -0.5 if scale is None else scale)
    packed = [_packed(node, x) for x in operands(node)[:3]]
    results = insert(node, varlen, *packed, bounds, longest, *settings)
    out = insert(node, operator.getitem, results, 0)
    # From [T, H, D] back to the call's layout, such as [1, H, T, D].
    ones = [1] * (len(shape(node)) - 3)
    row = insert(node, aten.view.default, out, [*ones, -1, shape(query)[-3], shape(value)[-1]])
    result = insert(node, aten.transpose.int, row, len(ones), len(ones) + 1)
    node.replace_all_uses_with(result)


def _packed(place: fx.Node, x: fx.Node) -> fx.Node:
    heads, _, width = shape(x)[-3:]
    swapped = insert(place, aten.transpose.int, x, len(shape(x)) - 3, len(shape(x)) - 2)
    return insert(place, aten.view.default, swapped, [-1, heads, width])

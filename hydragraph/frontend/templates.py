"""Tracing of a block to a forward graph with a symbolic token count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.added_inputs import ADDED
from hydragraph.frontend.counted_positions import use_position_ids
from hydragraph.frontend.dropout_calls import INPUTS
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.plain_attention import use_packed_sequences
from hydragraph.frontend.skeleton import BlockCall, FlatBlock
from hydragraph.frontend.skeleton_parts import template_of
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.program import Template
from hydragraph.private.tracing import symbol_name


def capture_template(call: BlockCall, hints: dict[str, int]) -> Template:
    """Trace a block to a template with the inputs "hidden" and "other.{i}".

    The latter are the remaining tensor arguments, followed by the `ADDED` fields.
    """
    symbols: dict[str, torch.export.Dim] = {}
    examples = [_example(tensor, hints, symbols, call.name) for tensor in call.inputs]
    arguments = tuple(argument for argument, _ in examples)
    exported = export(FlatBlock(call), arguments, (tuple(dims for _, dims in examples),), call.name)
    graph, signature = functional_graph(exported, call.name, block=True)
    names = ["hidden", *(f"other.{i}" for i in range(len(arguments) - 1))]
    given: Any = signature.user_inputs
    inputs: dict[Any, str] = dict(zip(given, names, strict=True))
    tensors = [
        {k: v.removeprefix("block.") for k, v in local.items()}
        for local in (signature.inputs_to_parameters, signature.inputs_to_buffers)
    ]
    hidden = next(n for n in placeholders_of(graph) if n.name == given[0])
    tokens = symbol_name(value_of(hidden).shape[1])
    if tokens is not None:
        use_position_ids(graph.graph, tokens)
        use_packed_sequences(graph.graph, tokens)
    # Added fields continue the numbers of the block's arguments.
    inputs |= {name: f"other.{len(arguments) - 1 + i}" for i, name in enumerate(ADDED)}
    return template_of(graph, (*tensors, inputs | INPUTS), call.name)


def _example(
    tensor: Tensor, hints: dict[str, int], symbols: dict[str, torch.export.Dim], where: str
) -> tuple[Tensor, dict[int, torch.export.Dim]]:
    sizes = []
    dims = {}
    for d, size in enumerate(tensor.shape):
        symbol = symbol_name(size)
        if symbol is None:
            sizes.append(int(size))
            continue
        if symbol not in hints:
            remedy = "pass only tensors whose sizes are constants, the token count or the sequence count"
            raise Unsupported(f"an input has the size {symbol}, computed from other sizes", where=where, remedy=remedy)
        dims[d] = symbols.setdefault(symbol, torch.export.Dim(f"D{len(symbols)}", min=2, max=1 << 24))
        sizes.append(hints[symbol])
    return torch.empty(sizes, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point()), dims

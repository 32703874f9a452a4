"""Tracing of one block of each kind to a forward graph, with a symbolic token count."""

from __future__ import annotations

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.dropout_calls import INPUTS
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.skeleton import Site
from hydragraph.frontend.skeleton_parts import template_of
from hydragraph.ir.program import Template
from hydragraph.private.tracing import symbol_name


def capture_template(site: Site, hints: dict[str, int]) -> Template:
    """Trace a block.

    Args:
        site: the block and the arguments it was called with.
        hints: example values of symbolic sizes, by symbol.

    Returns:
        the template, with inputs "hidden" and "other.{i}" for the other tensor arguments that it uses.
    """
    symbols: dict[str, torch.export.Dim] = {}
    arguments = []
    dynamic = []
    for tensor in site.inputs:
        sizes, dims = _example(tensor, hints, symbols, site.name)
        arguments.append(
            torch.empty(sizes, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())
        )
        dynamic.append(dims)
    exported = export(site.flat(), tuple(arguments), (tuple(dynamic),), site.name)
    graph, signature = functional_graph(exported, site.name, block=True)
    prefix = "block."
    inputs = dict(
        zip(signature.user_inputs, ["hidden", *(f"other.{i}" for i in range(len(arguments) - 1))], strict=True)
    )
    return template_of(
        graph,
        {k: v.removeprefix(prefix) for k, v in signature.inputs_to_parameters.items()},
        {k: v.removeprefix(prefix) for k, v in signature.inputs_to_buffers.items()},
        {**inputs, **INPUTS},  # type: ignore[dict-item]
        site.name,
    )


def _example(
    tensor: Tensor, hints: dict[str, int], symbols: dict[str, torch.export.Dim], where: str
) -> tuple[list[int], dict[int, torch.export.Dim]]:
    """Return an example size of a block's input, and its symbolic dimensions."""
    sizes = []
    dims = {}
    for d, size in enumerate(tensor.shape):
        symbol = symbol_name(size)
        if symbol is None:
            sizes.append(int(size))
            continue
        if symbol not in hints:
            raise Unsupported(
                f"a block input has the derived size {symbol}",
                where=where,
                remedy="pass blocks tensors whose sizes are constants, the token count or the sequence count",
            )
        dims[d] = symbols.setdefault(symbol, torch.export.Dim(f"D{len(symbols)}", min=2, max=1 << 24))
        sizes.append(hints[symbol])
    return sizes, dims

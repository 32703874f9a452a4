"""Splitting of the skeleton into prologue, aux and epilogue, and construction of a Template from each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.program import Template, graph_digest


def extract(graph: fx.GraphModule, outputs: Sequence[fx.Node], renamed: Mapping[fx.Node, str]) -> fx.GraphModule:
    """Return the part of a graph that computes `outputs`; nodes in `renamed` become placeholders with these names."""
    needed: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in renamed:
                pending += node.all_input_nodes
    part = fx.Graph()
    copied = {}
    placeholders = [n for n in graph.graph.nodes if n in needed and (n.op == "placeholder" or n in renamed)]
    for node in placeholders:
        copied[node] = part.placeholder(renamed.get(node, node.name))
        copied[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = part.node_copy(node, lambda n: copied[n])
    part.output(tuple(copied[o] for o in outputs))
    return fx.GraphModule(graph, part)


def template_of(
    graph: fx.GraphModule,
    parameters: Mapping[str, str],
    buffers: Mapping[str, str],
    inputs: Mapping[str, str],
    where: str,
) -> Template:
    """Make a Template from a graph: sort placeholders into parameters, buffers and inputs, with readable names.

    Args:
        graph: one part of the model; unused placeholders are dropped.
        parameters, buffers, inputs: placeholder name -> name in the template.
        where: description of what is captured, for errors.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    # All code that binds a template's placeholders relies on this order: parameters, buffers, inputs.
    groups: tuple[list[fx.Node], ...] = ([], [], [])
    for node in placeholders:
        kind = next((i for i, names in enumerate((parameters, buffers, inputs)) if node.name in names), None)
        if kind is None:
            raise Unsupported(
                f"the forward makes a constant tensor ({node.name})",
                where=where,
                remedy="register it as a buffer in the module's __init__",
            )
        if node.users:
            groups[kind].append(node)
    tensors = {**parameters, **buffers, **inputs}
    names = tuple(tuple(tensors[n.name] for n in group) for group in groups)
    ordered = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in (n for group in groups for n in group):
        copied[node] = ordered.placeholder(_identifier(tensors[node.name]))
        copied[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node.op == "output":
            ordered.output(torch.fx.node.map_arg(node.args[0], lambda n: copied[n]))
        elif node.op != "placeholder":
            copied[node] = ordered.node_copy(node, lambda n: copied[n])
    ordered.lint()
    module = fx.GraphModule(graph, ordered)
    return Template(graph_digest(module), module, *names)


def _identifier(name: str) -> str:
    """Return a name as a valid identifier: modules of an nn.Sequential have numbers as names."""
    name = name.replace(".", "_")
    return name if name.isidentifier() else f"_{name}"

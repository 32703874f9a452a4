"""Extraction of parts of a model's graph as templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.program import Template, graph_digest
from hydragraph.private.module_internals import graph_module
from hydragraph.private.tracing import ancestors_of


def extract(graph: fx.GraphModule, outputs: Sequence[fx.Node], renamed: Mapping[fx.Node, str]) -> fx.GraphModule:
    """Return the part of a graph that computes `outputs`; nodes in `renamed` become placeholders."""
    needed = ancestors_of(outputs, lambda node: node not in renamed)
    part = fx.Graph()
    copied = {}
    placeholders = [n for n in graph.graph.nodes if n in renamed or (n in needed and n.op == "placeholder")]
    for node in placeholders:
        copied[node] = part.placeholder(renamed.get(node, node.name))
        copied[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = part.node_copy(node, lambda n: copied[n])
    part.output(tuple(copied[o] for o in outputs))
    return graph_module(graph, part)


def template_of(graph: fx.GraphModule, names: Sequence[Mapping[str, str]], where: str) -> Template:
    """Make a Template from a graph.

    Args:
        names: maps from placeholder to name, for parameters, buffers and inputs in this order.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    tensors = {placeholder: name for kind in names for placeholder, name in kind.items()}
    constant = next((n for n in placeholders if n.name not in tensors), None)
    if constant is not None:
        remedy = "register this tensor as a buffer in the module's __init__"
        raise Unsupported(f"forward creates a constant tensor ({constant.name})", where=where, remedy=remedy)
    # Callers rely on the order of parameters, buffers and inputs.
    groups = [[n for n in placeholders if n.users and n.name in kind] for kind in names]
    in_template = [tuple(tensors[n.name] for n in group) for group in groups]
    ordered = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in (n for group in groups for n in group):
        copied[node] = ordered.placeholder(identifier(tensors[node.name]))
        copied[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node.op == "output":
            ordered.output(torch.fx.node.map_arg(node.args[0], lambda n: copied[n]))
        elif node.op != "placeholder":
            copied[node] = ordered.node_copy(node, lambda n: copied[n])
    ordered.lint()
    module = graph_module(graph, ordered)
    return Template(graph_digest(module), module, *in_template)


def identifier(name: str) -> str:
    """Turn a tensor's name, which may be a number, into an identifier for its placeholder."""
    name = name.replace(".", "_")
    return name if name.isidentifier() else f"_{name}"

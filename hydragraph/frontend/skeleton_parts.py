"""Extraction of templates from a model's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import results_of
from hydragraph.ir.program import Template, graph_digest
from hydragraph.private.tracing import ancestors_of, subgraph


def extract(graph: fx.GraphModule, outputs: Sequence[fx.Node], renamed: Mapping[fx.Node, str]) -> fx.GraphModule:
    """Return the part of a graph that computes `outputs`; nodes in `renamed` become placeholders."""
    needed = ancestors_of(outputs, lambda node: node not in renamed)
    placeholders = [n for n in graph.graph.nodes if n in renamed or (n in needed and n.op == "placeholder")]
    inputs = {node: renamed.get(node, node.name) for node in placeholders}
    return subgraph(graph, inputs, [node for node in graph.graph.nodes if node in needed], outputs)


def template_of(graph: fx.GraphModule, names: Sequence[Mapping[str, str]], where: str) -> Template:
    """Make a Template; `names` maps placeholders to names, for parameters, buffers and inputs in this order."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    tensors = {placeholder: name for kind in names for placeholder, name in kind.items()}
    constant = next((n for n in placeholders if n.name not in tensors), None)
    if constant is not None:
        remedy = "register this tensor as a buffer in the module's __init__ (a loss may be a module)"
        raise Unsupported(f"forward or loss creates a constant tensor ({constant.name})", where=where, remedy=remedy)
    # The order is parameters, buffers, inputs.
    groups = [[n for n in placeholders if n.users and n.name in kind] for kind in names]
    in_template = [tuple(tensors[n.name] for n in group) for group in groups]
    inputs = {node: identifier(tensors[node.name]) for group in groups for node in group}
    computed = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    module = subgraph(graph, inputs, computed, results_of(graph))
    return Template(graph_digest(module), module, *in_template)


def identifier(name: str) -> str:
    name = name.replace(".", "_")
    return name if name.isidentifier() else f"_{name}"

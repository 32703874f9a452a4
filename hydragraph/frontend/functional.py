"""From an exported program to a plain functional graph."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from hydragraph.errors import Unsupported
from hydragraph.passes.clean import GRAD_MODE, clean


def functional_graph(exported: ExportedProgram, where: str) -> tuple[fx.GraphModule, ExportGraphSignature]:
    """Return the cleaned graph and the signature of its placeholders.

    A graph that writes in place is functionalized by `run_decompositions`, which takes seconds and forgets where
    gradients were switched off; so it is used only for graphs that need it and switch nothing off.

    Raises:
        Unsupported: the graph does both.
    """
    nodes = _nodes(exported.graph_module)
    if not any(_writes(n) for n in nodes):
        return clean(exported.graph_module), exported.graph_signature
    if any(GRAD_MODE in str(n.target) for n in nodes):
        raise Unsupported(
            "operators that write in place, beside a torch.no_grad() region",
            where=where,
            remedy="replace the in-place operators (x.add_(y) -> x = x + y)",
        )
    exported = exported.run_decompositions({})
    return clean(exported.graph_module), exported.graph_signature


def _nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """List the nodes of a graph and of its regions, which `clean` inlines."""
    return [n for module in graph.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable

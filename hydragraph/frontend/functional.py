"""From an exported program to a plain functional graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from hydragraph.errors import Unsupported
from hydragraph.frontend.unseen import watched
from hydragraph.passes.clean import AUTOCAST, GRAD_MODE, clean, region
from hydragraph.private.operators import arguments_of, has_tag
from hydragraph.private.tracing import meta_as_cpu, writes


def export(module: nn.Module, arguments: tuple[Any, ...], dynamic: tuple[Any, ...], where: str) -> ExportedProgram:
    """Trace a module, with sizes that are known only at run time.

    Raises:
        Unsupported: whatever the module or the trace raised, which stays the cause.
    """
    try:
        with watched(where, module), meta_as_cpu():
            return torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
    except Unsupported:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise Unsupported(
            f"torch.export cannot trace it with T tokens in N sequences ({_reason(error)})",
            where=where,
            remedy="make the forward free of Python decisions on tensor values and token counts; the cause is above",
        ) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[1] if lines[0].startswith("Constraints violated") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {line[:300]}"


def functional_graph(exported: ExportedProgram, where: str) -> tuple[fx.GraphModule, ExportGraphSignature]:
    """Return the cleaned graph and the signature of its placeholders.

    A graph that writes in place is functionalized by `run_decompositions`, which takes seconds and forgets where
    gradients were switched off; so it is used only for graphs that need it and switch nothing off.

    Raises:
        Unsupported: the graph does both, or draws random numbers.
    """
    nodes = _nodes(exported.graph_module)
    _refuse_changes(exported, where)
    if not any(writes(n) for n in nodes):
        return _steady(clean(exported.graph_module), where), exported.graph_signature
    if any(GRAD_MODE in str(n.target) for n in nodes):
        raise Unsupported(
            "operators that write in place, beside a torch.no_grad() region",
            where=where,
            remedy="replace the in-place operators (x.add_(y) -> x = x + y)",
        )
    exported = exported.run_decompositions({})
    return _steady(clean(exported.graph_module), where), exported.graph_signature


def _refuse_changes(exported: ExportedProgram, where: str) -> None:
    """Refuse a graph that writes into the model's buffers or parameters, and one that computes under autocast."""
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    graph = exported.graph_module
    changed = _changed(
        graph, {n: targets[n.name] for n in graph.graph.nodes if n.op == "placeholder" and n.name in targets}
    )
    if changed:
        raise changes(changed.removeprefix("model.").removeprefix("block."), where)
    for node in _nodes(graph):
        if AUTOCAST in str(node.target) and node.args[2]:
            raise Unsupported(
                "a torch.autocast region", where=where, remedy="cast by hand (x.to(dtype)), or pass dtype= alone"
            )


def changes(name: str, where: str) -> Unsupported:
    """Say that forward changes a tensor of its module."""
    return Unsupported(
        f"forward changes {name!r}, and what it writes would be lost",
        where=where,
        remedy="compute it anew in every forward; no buffer is carried from one step to the next",
    )


def _changed(graph: fx.GraphModule, targets: dict[fx.Node, str]) -> str | None:
    """Return the name of a tensor of the model that a graph writes into, itself or through a view.

    Args:
        targets: the nodes that are tensors of the model, with their names.
    """
    targets = dict(targets)
    for node in graph.graph.nodes:
        if GRAD_MODE in str(node.target) or AUTOCAST in str(node.target):
            body, arguments = region(graph, node)
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            inner_targets = {n: targets[a] for n, a in zip(inner, arguments, strict=True) if a in targets}
            inside = _changed(body, inner_targets)
            if inside:
                return inside
        for argument in arguments_of(node):
            if argument.aliased and isinstance(argument.value, fx.Node) and argument.value in targets:
                if argument.written:
                    return targets[argument.value]
                targets[node] = targets[argument.value]
    return None


def _nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """List the nodes of a graph and of its regions, which `clean` inlines."""
    return [n for module in graph.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes]


def _steady(graph: fx.GraphModule, where: str) -> fx.GraphModule:
    """Return the graph, which must draw no random numbers."""
    for node in graph.graph.nodes:
        if "scaled_dot_product" in str(node.target):
            # It has dropout too, but is refused for mixing tokens, which says more.
            continue
        if has_tag(node.target, torch.Tag.nondeterministic_seeded) or node.target is torch.ops.aten.dropout.default:
            raise Unsupported(
                f"{node.target} draws random numbers, and each rank would draw others",
                where=where,
                remedy="set dropout probabilities to 0, or call model.eval() to train without dropout",
            )
    return graph

"""Pass `split_backward`: split a backward in two, so that the gradient of the block's input can be sent early.

    input half     computes the gradient of "hidden", and returns the values that the weight half reads
    weight half    computes the gradients of parameters, and adds them to buffers or returns them

No operator runs twice, so gradients do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from hydragraph.passes.differentiate import Variant, saved_names
from hydragraph.private.tracing import ancestors_of, subgraph


@dataclass(frozen=True, eq=False)
class BackwardPart:
    """Half of a backward, with fields as in `Variant`."""

    backward: fx.GraphModule
    needs: tuple[str, ...]
    gradients: tuple[str, ...]
    added: tuple[str, ...] = ()


def split_backward(variant: Variant) -> tuple[BackwardPart, BackwardPart]:
    nodes = list(variant.backward.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    named = dict(zip(inputs, variant.needs, strict=False))
    results: list[fx.Node] = list(nodes[-1].args[0])
    gradients = dict(zip(variant.gradients, results, strict=True))
    hidden = gradients.pop("hidden", None)
    # early: nodes that the gradient of "hidden" needs. late: all others.
    early = ancestors_of([] if hidden is None else [hidden], lambda node: True)
    late = [n for n in nodes if n.op not in ("placeholder", "output", "get_attr") and n not in early]
    read = {operand for node in late for operand in node.all_input_nodes} | {*gradients.values()}
    # again: parameters and collectives, which both halves get. passed: other values that the weight
    # half reads.
    again = {n for n, name in named.items() if name != "tangent" and not name.startswith("saved.")}
    passed = [n for n in nodes if n in read and n not in again and (n in early or n in named)]
    # first: the input half's inputs. second, added: the weight half's, after `passed`.
    first = [n for n in inputs if n in named and (n in early or n in passed)]
    second = [n for n in inputs if n in again and n in read]
    added = [n for n in inputs if n not in named]
    kept = [n for n in nodes if n in early and n.op != "placeholder"]
    constants = [n for n in nodes if n.op == "get_attr"]
    front = () if hidden is None else ("hidden",)
    return (
        BackwardPart(
            _graph(variant, first, [*constants, *kept], [*([] if hidden is None else [hidden]), *passed]),
            tuple(named[n] for n in first),
            front,
        ),
        BackwardPart(
            _graph(variant, [*passed, *second, *added], [*constants, *late], [*gradients.values()]),
            (*saved_names(len(passed)), *(named[n] for n in second)),
            tuple(gradients),
            variant.added,
        ),
    )


def _graph(
    variant: Variant, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    part = subgraph(variant.backward, {node: node.name for node in inputs}, nodes, results)
    for node in part.graph.find_nodes(op="get_attr"):
        if not node.users:
            part.graph.erase_node(node)
    return part

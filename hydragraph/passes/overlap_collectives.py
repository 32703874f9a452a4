"""Pass `overlap_collectives`: run collectives while the graph computes values that do not depend on them.

    before     total += dy^t x;  dx = dy W;  s = all_reduce(dx);  y = s * w
    after      dx = dy W;  p = start_all_reduce(dx);  total += dy^t x;  s = p.result();  y = s * w

A collective starts as soon as its operand exists, and the graph waits for it just before the first reader of the
result, so that products of weight gradients run meanwhile (Megatron-LM, Shoeybi et al., 2019). Collectives keep their
order, which all ranks of a stage share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import fx

from hydragraph.ir.graph_data import storages_of, value_of
from hydragraph.passes.collective_operators import RESULT, STARTS
from hydragraph.passes.differentiate import Variant
from hydragraph.private.module_internals import graph_module


def overlap_collectives(variant: Variant) -> Variant:
    return replace(variant, forward=_overlapped(variant.forward), backward=_overlapped(variant.backward))


def _overlapped(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    # Starts of collectives whose results are not yet read
    started: dict[fx.Node, fx.Node] = {}

    def copy(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            for read in node.all_input_nodes:
                if read in started:
                    copies[read] = graph.call_method(RESULT, (started.pop(read),))
                    copies[read].meta = dict(read.meta)
            copies[node] = graph.node_copy(node, copies.__getitem__)

    # since: uncopied nodes after the last collective. At the next one, copy the nodes that it
    # needs, its start, then the others, which run meanwhile.
    since: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op != "call_method" or node.target not in STARTS:
            since.append(node)
            continue
        needed = _needed(node, since)
        copy([*(n for n in since if n in needed), node])
        # The copy becomes the start. Readers get the result, inserted before the first.
        started[node] = _start(copies.pop(node), node)
        copy(n for n in since if n not in needed)
        since = []
    copy(since)
    graph.lint()
    return graph_module(module, graph)


def _needed(collective: fx.Node, since: Sequence[fx.Node]) -> Collection[fx.Node]:
    # FX requires placeholders before all other nodes.
    needed = {*collective.all_input_nodes, *(n for n in since if n.op == "placeholder")}
    for node in reversed(since):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _start(call: fx.Node, collective: fx.Node) -> fx.Node:
    call.target = STARTS[str(collective.target)]
    # The operand counts as memory until the collective ends, so the start's value has both.
    both = (collective, collective.all_input_nodes[1])
    call.meta = {
        "val": tuple(map(value_of, both)),
        "storages": [number for node in both for number, _ in storages_of(node)],
    }
    return call

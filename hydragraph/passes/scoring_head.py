"""Pass `scoring_head`: make the last block return the log-probability of each target, or 0 without a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.program import Block, Program, Template, graph_digest
from hydragraph.kernels import token_entropy as _entropy  # noqa: F401  registers hydragraph::token_entropy
from hydragraph.passes.clean import read_sizes_of_values, remove_dead_code
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.operator_rules import MOVES, VIEWS
from hydragraph.passes.vocabulary import NONE
from hydragraph.private.module_internals import graph_module
from hydragraph.spec.workload import IGNORED

aten = torch.ops.aten

V = TypeVar("V")

_KEEPS = VIEWS | MOVES | {aten.select.int, aten.clone.default, aten.contiguous.default}


def scoring_program(program: Program, entropy: bool = False) -> Program:
    """Return a program that ends with log-probabilities [1, T, 1], or with entropies [1, T, 2].

    Raises:
        Unsupported: the loss does not compute exactly one cross-entropy with the batch's labels.
    """
    block = program.blocks[-1]
    head, scoring = _with_scores(block, program.templates[block.template], program.model, entropy)
    others = {name: template for name, template in program.templates.items() if name != block.template}
    return replace(program, blocks=(*program.blocks[:-1], head), templates={**others, scoring.name: scoring})


def _with_scores(block: Block, template: Template, model: str, entropy: bool) -> tuple[Block, Template]:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(template.graph.graph, copied)
    loss = copied[_cross_entropy(template.graph.graph, model)]
    logits, labels = operands(loss)[:2]
    value = value_of(labels).to(value_of(loss).dtype)

    def call(target: Any, arguments: tuple[Any, ...], result: Any) -> fx.Node:
        node = graph.call_function(target, arguments)
        node.meta["val"] = result
        return node

    # Replace the loss by a cost per token; omit all that follows.
    costs = call(aten.cross_entropy_loss.default, (logits, labels, None, NONE, IGNORED), value)
    scores = [call(aten.neg.default, (costs,), value)]
    if entropy:
        constant = call(aten.detach.default, (logits,), value_of(logits))
        scores.append(call(torch.ops.hydragraph.token_entropy.default, (constant, labels, IGNORED), value))
    row = call(aten.stack.default, (scores, -1), torch.stack([value] * len(scores), -1))
    graph.output((call(aten.unsqueeze.default, (row, 0), value_of(row).unsqueeze(0)),))
    remove_dead_code(graph)
    read_sizes_of_values(graph)
    # Drop inputs that only the loss used.
    placeholders = placeholders_of(template.graph)
    names = (*template.parameters, *template.buffers, *template.inputs)
    unread = {name for name, node in zip(names, placeholders, strict=True) if not copied[node].users}
    for node in placeholders:
        if not copied[node].users:
            graph.erase_node(copied[node])
    graph.lint()
    module = graph_module(template.graph, graph)

    def kept(values: tuple[V, ...], names: Sequence[str]) -> tuple[V, ...]:
        return tuple(value for value, name in zip(values, names, strict=True) if name not in unread)

    groups = (template.parameters, template.buffers, template.inputs)
    others = [name for name in template.inputs if name.startswith("other.")]
    read = replace(
        block,
        template=graph_digest(module),
        parameters=kept(block.parameters, template.parameters),
        buffers=kept(block.buffers, template.buffers),
        aux=kept(block.aux, others),
    )
    return read, Template(read.template, module, *(kept(names, names) for names in groups))


def _cross_entropy(graph: fx.Graph, model: str) -> fx.Node:
    # Losses of the same logits have equal log-probabilities.
    by_logits: dict[fx.Node, fx.Node] = {
        operands(node)[0]: node
        for node in graph.nodes
        if node.target is aten.cross_entropy_loss.default and _are_labels(operands(node)[1])
    }
    if len(by_logits) == 1:
        return next(iter(by_logits.values()))
    several = "log-probabilities of several logits tensors" if by_logits else "no log-probability per token"
    raise Unsupported(
        f"the loss has {several}",
        where=model,
        remedy="compile with a loss that calls hydragraph.token_logprobs(outputs, batch) exactly once, "
        "or cross_entropy exactly once with logits [T, V] and the batch's labels",
    )


def _are_labels(node: fx.Node) -> bool:
    vector = len(shape(node)) == 1
    while node.op == "call_function" and node.target in _KEEPS:
        node = operands(node)[0]
    return vector and node.op == "placeholder" and node.name == "labels"

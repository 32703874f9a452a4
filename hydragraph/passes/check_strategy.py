"""Validation of a strategy against a program."""

from __future__ import annotations

import functools

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Program, Template
from hydragraph.passes.find_cuts import find_cuts, rules
from hydragraph.passes.graph_node import operands
from hydragraph.passes.operator_rules import VIEWS
from hydragraph.passes.place import refuse_streams
from hydragraph.spec.strategy import Strategy

aten = torch.ops.aten

REMEDY = "use stages with one device each (tensor-parallel degree 1)"


def check_strategy(program: Program, strategy: Strategy, ranks: int) -> None:
    """Check that a strategy fits a model and the number of ranks.

    Raises:
        ValueError: layers, ranks or tensor-parallel degrees do not fit.
        Unsupported: a stage's degree cannot shard a parameter, a layer has no parameter to shard, or the schedule does
            not support streaming.
    """
    refuse_streams(strategy)
    strategy.check(program.layers, ranks, program.heads)
    for tp in {stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages} - {1}:
        for parameter in program.parameters.values():
            parameter.intervals(tp, 0)
    refuse_uncut(program, strategy)


def refuse_uncut(program: Program, strategy: Strategy) -> None:
    """Check that tensor parallelism shards every layer.

    Small parameters (norms, a router) and a head whose loss needs all logits may stay replicated.

    Raises:
        Unsupported: an operator with a weight has no sharding rule, or a layer has no weight.
    """
    if all(stage.tp == 1 for pipeline in strategy.pipelines for stage in pipeline.stages):
        return
    for block in program.blocks[1:-1]:
        template = program.templates[block.template]
        problem = _problem(template)
        if problem is not None:
            place, what = problem
            raise Unsupported(what, where=block.parameters[template.parameters.index(place)], remedy=REMEDY)
        if not any(program.parameters[name].rule for name in block.parameters):
            raise Unsupported(
                "none of its products has a weight to shard, so every rank would compute the whole block",
                where=block.name,
                remedy=REMEDY,
            )


@functools.lru_cache(maxsize=64)
def _problem(template: Template) -> tuple[str, str] | None:
    # Weights of experts and convolutions are 3-D. A vector may have extra dimensions of size 1.
    nodes = placeholders_of(template.graph)
    parameters = dict(zip(nodes, template.parameters, strict=False))
    cuts = find_cuts(template.graph.graph, set(parameters), None, set())
    cut = rules(cuts)
    for node, name in parameters.items():
        sizes = value_of(node).shape
        if len(sizes) > 2 and max(sizes) < sizes.numel() and node not in cut:
            what = f"a parameter of {len(sizes)} dimensions in {_user(node).target}"
            return name, f"{what}, which has no sharding rule"
    # `communicate` deliberately has no rule: a product that reaches the next region stays whole.
    for product, unknown in cuts.unknown.items():
        weight = next((n for n in operands(product) if n in parameters), None)
        if weight is not None and unknown.target is not communicate:
            return parameters[weight], f"its product reaches {unknown.target}, which has no sharding rule"
    return None


def _user(node: fx.Node) -> fx.Node:
    user = next(iter(node.users))
    return _user(user) if user.target in (aten.transpose.int, aten.permute.default, *VIEWS) and user.users else user

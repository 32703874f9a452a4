"""Check that a strategy fits a program and a world, before anything is lowered.

Tensor parallelism is refused for what it cannot cut and would otherwise repeat on every rank of a stage in silence.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Program, Template
from hydragraph.passes.find_cuts import find_cuts
from hydragraph.passes.graph_node import operands
from hydragraph.passes.operator_rules import VIEWS
from hydragraph.spec.strategy import Strategy

aten = torch.ops.aten

REMEDY = "give its stages one device each (tensor-parallel degree 1)"


def check_strategy(program: Program, strategy: Strategy, ranks: int) -> None:
    """Check that a strategy fits a model and a world, on every rank alike.

    Raises:
        ValueError: wrong layers, unknown ranks, heads that do not divide.
        Unsupported: a stage's degree cannot cut a parameter, or cuts nothing.
    """
    # `intervals` refuses a degree that a parameter cannot be cut for; it does so alike for every place in a stage.
    strategy.check(program.layers, ranks, program.heads)
    for tp in {stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages} - {1}:
        for parameter in program.parameters.values():
            parameter.intervals(tp, 0)
    refuse_uncut(program, strategy)


def refuse_uncut(program: Program, strategy: Strategy) -> None:
    """Check the layers of a program for a strategy, on every rank alike.

    Small whole parameters (norms, a router) and the head of a loss that needs all logits are repeated on purpose.

    Raises:
        Unsupported: a stage has more than one device, and a layer has experts, or an operator without a rule on a
            value that would be cut.
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
                "none of its products has a weight that can be cut, so every rank would repeat all of it",
                where=block.name,
                remedy=REMEDY,
            )


@functools.lru_cache(maxsize=64)
def _problem(template: Template) -> tuple[str, str] | None:
    """Return the parameter of a template that cannot be cut, and why."""
    # Matrices have two dimensions; a third counts experts, which products by groups of rows take at once.
    nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    parameters = dict(zip(nodes, template.parameters, strict=False))
    for node, name in parameters.items():
        if len(value_of(node).shape) > 2:
            what = f"experts (a parameter of {len(value_of(node).shape)} dimensions) in {_user(node).target}"
            return name, f"{what}, which has no sharding rule"
    cuts = find_cuts(template.graph.graph, set(parameters), None, set())
    for product, unknown in cuts.unknown.items():
        weight = next((n for n in operands(product) if n in parameters), None)
        # A product that ends at a placeholder is kept whole on purpose: that is where the analysis put it.
        if weight is not None and unknown.target is not communicate:
            return parameters[weight], f"its product reaches {unknown.target}, which has no sharding rule"
    return None


def _user(node: fx.Node) -> fx.Node:
    """Return the first operator that computes with a value rather than to move its dimensions."""
    user = next(iter(node.users))
    return _user(user) if user.target in (aten.transpose.int, aten.permute.default, *VIEWS) and user.users else user

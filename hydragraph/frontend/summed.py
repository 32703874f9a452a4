"""Refuse a loss that is a mean: a step divides by the targets of the whole mini-batch, so a loss is a sum over tokens.

Cut into micro-batches, sums of a loss add up and means do not. Seen from the result backwards, through values of one
element:

    loss = nll.mean()                      a mean over tokens
    loss = cross_entropy(x, y)             the same: reduction="mean" is PyTorch's default
    loss = nll.sum() / (y != -100).sum()   divided by a number that depends on the batch
    loss = nll.sum() / temperature         a sum
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Template

aten = torch.ops.aten

# The number by which operators know reduction="mean".
_MEAN = 1
_MEANS = frozenset({aten.mean.default, aten.mean.dim})
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.mul.Tensor, aten.mul.Scalar})


def refuse_mean(template: Template, where: str) -> None:
    """Raise Unsupported if what a template returns is a mean over tokens, or divided by what depends on the batch."""
    nodes = list(template.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    varies = set(placeholders[len(placeholders) - len(template.inputs) :])
    for node in nodes:
        if any(n in varies for n in node.all_input_nodes):
            varies.add(node)
    for node in nodes:  # of every token too
        sizes = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.SymInt | torch.SymFloat)]
        if node.target in _DIVISIONS and sizes:
            _refuse(f"it is scaled by {sizes[0].name}, a number of tokens or sequences ({node.target})", where)
    pending = list(next(n for n in nodes if n.op == "output").args[0])
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op != "call_function":
            continue
        if node.target in _MEANS or _reduction(node) == _MEAN:
            if any(_counts_tokens(n) for n in node.all_input_nodes):
                _refuse(f"it is a mean over tokens ({node.target})", where)
        elif node.target in _DIVISIONS:
            divisor = [n for n in node.all_input_nodes if n in varies and _is_divisor(n, node, varies)]
            if divisor:
                _refuse(f"it is scaled by {divisor[0].name}, which depends on the batch ({node.target})", where)
        inner = [n for n in node.all_input_nodes if _is_one_number(n) and n not in seen]
        pending += inner
        seen.update(inner)


def _is_divisor(node: fx.Node, by: fx.Node, varies: Collection[fx.Node]) -> bool:
    """Say whether one of two numbers that depend on the batch scales the other; a product of two is no sum either."""
    second = len(by.args) > 1 and by.args[1] is node and _is_one_number(node)
    first = by.args[0]
    return second and ("mul" not in str(by.target) or (isinstance(first, fx.Node) and first in varies))


def _reduction(node: fx.Node) -> int | None:
    """Return how a loss of PyTorch's reduces; None: the operator is none."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "reduction":
            value: Any = node.args[i] if i < len(node.args) else node.kwargs.get("reduction", argument.default_value)
            return int(value)
    return None


def _counts_tokens(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _is_one_number(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and all(type(size) is int and size == 1 for size in value.shape)


def _refuse(what: str, where: str) -> NoReturn:
    raise Unsupported(
        f"its loss is no sum: {what}",
        where=where,
        remedy="return the sum over all targets (reduction='sum'): a step divides it by the targets of the mini-batch",
    )

"""Rejection of losses that are not a sum over tokens.

loss = nll.mean()                      a mean over tokens
loss = nll.sum() / (y != -100).sum()   divided by a number that depends on the batch
loss = nll.sum() / temperature         a sum, so accepted
loss = (nll * x.softmax(1)).sum()      a softmax over all packed tokens
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import torch
from torch import Tensor, fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.terms import SCALED, first_across
from hydragraph.ir.graph_data import placeholders_of, results_of, value_of
from hydragraph.ir.program import Template
from hydragraph.private.operator_schemas import argument_of, aten_operators
from hydragraph.private.tracing import ancestors_of

aten = torch.ops.aten

# PyTorch's code for reduction="mean"
_MEAN = 1
_MEANS = aten_operators("mean mean.dim")


def refuse_unsummed(template: Template, where: str) -> None:
    """Raise Unsupported unless a loss is a sum of terms, each computed from one token or sequence."""
    nodes = list(template.graph.graph.nodes)
    bounds = [n for n in nodes if n.op == "placeholder" and n.name in ("cu_seqlens", "max_length") and n.users]
    across = first_across(nodes, bounds)
    if across is not None:
        _refuse(across, where)


def refuse_mean(template: Template, where: str) -> None:
    nodes = list(template.graph.graph.nodes)
    placeholders = placeholders_of(template.graph)
    # varies: values that depend on the batch.
    varies = set(placeholders[len(placeholders) - len(template.inputs) :])
    for node in nodes:
        if any(n in varies for n in node.all_input_nodes):
            varies.add(node)
    for node in nodes:
        sizes = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.SymInt | torch.SymFloat)]
        if node.target in SCALED and sizes:
            _refuse(f"it is scaled by {sizes[0].name}, a number of tokens or sequences ({node.target})", where)
    results = results_of(template.graph)
    # numbers: operators that reduce rows to one number, from the loss back.
    numbers = ancestors_of(results, lambda n: n.op == "call_function" and (n in results or _is_one_number(n)))
    for node in reversed([n for n in nodes if n in numbers]):
        if node.target in _MEANS or argument_of(node, "reduction") == _MEAN:
            shapes = [getattr(value_of(n), "shape", ()) for n in node.all_input_nodes]
            if any(isinstance(size, torch.SymInt) for sizes in shapes for size in sizes):
                _refuse(f"it is a mean over tokens ({node.target})", where)
        elif node.target in SCALED:
            divisor = [n for n in node.all_input_nodes if n in varies and _is_divisor(n, node, varies)]
            if divisor:
                _refuse(f"it is scaled by {divisor[0].name}, which depends on the batch ({node.target})", where)


def _is_divisor(node: fx.Node, by: fx.Node, varies: Collection[fx.Node]) -> bool:
    second = len(by.args) > 1 and by.args[1] is node and _is_one_number(node)
    first = by.args[0]
    return second and ("mul" not in str(by.target) or (isinstance(first, fx.Node) and first in varies))


def _is_one_number(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and all(type(size) is int and size == 1 for size in value.shape)


def _refuse(what: str, where: str) -> NoReturn:
    remedy = "return the sum over all targets (reduction='sum'): a step divides it by the number of targets"
    raise Unsupported(f"the loss is not a sum: {what}", where=where, remedy=remedy)

"""Reject a loss that is not a sum over tokens: a step divides by the number of targets of the whole mini-batch.

Across micro-batches, summed losses add up and means do not. Traced backwards from the result, through values of one
element:

    loss = nll.mean()                      a mean over tokens
    loss = cross_entropy(x, y)             the same: reduction="mean" is PyTorch's default
    loss = nll.sum() / (y != -100).sum()   divided by a number that depends on the batch
    loss = nll.sum() / temperature         a sum

And forwards from the batch: each token's term is computed from that token alone, and everything after their sum is
linear; otherwise the sums of two micro-batches would not add up:

    loss = (nll * x.softmax(1)).sum()      a softmax over tokens, of whatever was packed together
    loss = nll.sum().sqrt()                the root of a sum
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.terms import first_across
from hydragraph.frontend.token_axes import mixing
from hydragraph.frontend.token_order import Rows
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Template
from hydragraph.passes.graph_node import operands, shape
from hydragraph.passes.operator_rules import MOVES, VIEWS
from hydragraph.private.tracing import is_counted

aten = torch.ops.aten

# Encoding of reduction="mean" in operator arguments.
_MEAN = 1
_MEANS = frozenset({aten.mean.default, aten.mean.dim})
_DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.mul.Tensor, aten.mul.Scalar})


# Operators that commute with a sum.
_LINEAR = (
    MOVES
    | VIEWS
    | {aten.neg.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.mean.default, aten.mean.dim}
    | {aten.to.dtype, aten._to_copy.default, aten.squeeze.default, aten.squeeze.dims, aten.sum.default, aten.select.int}
    | {aten.sum.dim_IntList, aten.slice.Tensor}
)
_ADDED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.stack.default, aten.cat.default})
_SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor})
_CLASSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default})
_SUM = 2


def refuse_unsummed(template: Template, tokens: str, where: str) -> None:
    """Raise Unsupported for a loss that is not a sum of terms computed from each token alone.

    A loss that reads sequence bounds is a sum over sequences, and one that selects tokens with a mask has sizes that
    the graph does not determine; see `terms` for both.

    Args:
        tokens: the symbol of the token count.
    """
    nodes = list(template.graph.graph.nodes)
    bounds = [n for n in nodes if n.op == "placeholder" and n.name in ("cu_seqlens", "max_length") and n.users]
    if bounds or any(is_counted(size) for n in nodes for size in getattr(value_of(n), "shape", ())):
        across = first_across(nodes, bounds, _sums, _stays_a_sum)
        if across is not None:
            _refuse(across, where)
        return
    sums = _Sums()
    mixer = mixing(template.graph, tokens, 0, sums.follow)
    if mixer is not None:
        _refuse(f"{mixer[0]} {mixer[1]}", where)


class _Sums:
    """Tracker of sums over tokens through a loss."""

    def __init__(self) -> None:
        self._summed: set[fx.Node] = set()

    def follow(self, node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool | str:
        """Record sums over tokens; return False for an operator unrelated to any. See `mixing`."""
        if node.op == "output":
            unsummed = next((n for n in node.all_input_nodes if n not in self._summed), None)
            return True if unsummed is None else "is returned, which is not a sum over tokens"
        if node.op != "call_function":
            return False
        if any(n in self._summed for n in node.all_input_nodes):
            if any(n in rows for n in node.all_input_nodes) or not _stays_a_sum(node, self._summed):
                return "takes a sum over tokens, behind which only sums and factors may stand"
        elif not _sums(node, rows):
            return False
        self._summed.add(node)
        return True


def _stays_a_sum(node: fx.Node, summed: Container[fx.Node]) -> bool:
    """Return whether the result of an operator on sums over tokens, and on values without tokens, is still a sum."""
    others = [n for n in node.all_input_nodes if n not in summed]
    if node.target in _ADDED:
        numbers = [a for a in operands(node)[:2] if isinstance(a, int | float) and node.target is aten.add.Tensor]
        return not any(numbers) and all(_is_zero(n) for n in others)
    if node.target in _SCALED:
        factors = [a for a in operands(node)[:2] if a in summed]
        return len(factors) == 1 and ("mul" in str(node.target) or operands(node)[0] in summed)
    return node.target in _LINEAR


def _sums(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Return whether an operator sums its operand over tokens."""
    arguments = operands(node)
    first = arguments[0] if arguments else None
    if not isinstance(first, fx.Node) or first not in rows:
        return False
    dim = rows[first].dim
    if node.target is aten.sum.default:
        return True
    if node.target is aten.sum.dim_IntList:
        named = arguments[1]
        return not named or any(axis % len(shape(first)) == dim for axis in named)
    if node.target in _CLASSES:
        return _reduction(node) == _SUM and dim != min(1, len(shape(first)) - 1)
    if _reduction(node) == _SUM:
        return all(rows.get(n, rows[first]) == rows[first] for n in node.all_input_nodes)
    return node.target is aten.dot.default and all(n in rows for n in node.all_input_nodes)


def _is_zero(node: fx.Node) -> bool:
    """Return whether a value is all zeros, the initial value of a sum."""
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        return bool(operands(node)[-1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


def refuse_mean(template: Template, where: str) -> None:
    """Raise Unsupported if a template returns a mean over tokens, or a value divided by a batch-dependent one."""
    nodes = list(template.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    varies = set(placeholders[len(placeholders) - len(template.inputs) :])
    for node in nodes:
        if any(n in varies for n in node.all_input_nodes):
            varies.add(node)
    for node in nodes:  # including per-token values
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
    """Return whether one of two batch-dependent numbers scales the other; a product of two is not a sum either."""
    second = len(by.args) > 1 and by.args[1] is node and _is_one_number(node)
    first = by.args[0]
    return second and ("mul" not in str(by.target) or (isinstance(first, fx.Node) and first in varies))


def _reduction(node: fx.Node) -> int | None:
    """Return the reduction of a PyTorch loss, or None for any other operator."""
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
        f"its loss is not a sum: {what}",
        where=where,
        remedy="return the sum over all targets (reduction='sum'): a step divides it by the targets of the mini-batch",
    )

"""Search for the values that sequence parallelism shards by tokens.

A tensor-parallel region starts with an all-gather and ends with a reduce-scatter. Between regions, every rank has its
own tokens (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.passes.graph_node import dropout, operands, product, shape
from hydragraph.passes.operator_rules import (
    MOVES,
    NORMS,
    REDUCTIONS,
    SOFTMAX,
    SPLITS,
    VIEWS,
    carried,
    is_pointwise,
    join_dim,
    split_dim,
)
from hydragraph.passes.tensor_cut import Cuts
from hydragraph.private.tracing import symbol_name

aten = torch.ops.aten


def token_symbol(graph: fx.Graph) -> str | None:
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in ("hidden", "input_ids"):
            return symbol_name(shape(node)[1])
    return None


def token_dim(node: fx.Node, symbol: str | None) -> int | None:
    """Return the only dimension of a value that has the token count, or None."""
    value: Any = value_of(node)
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(value, torch.Tensor) or symbol is None:
        return None
    dims = [d for d, size in enumerate(value.shape) if symbol_name(size) == symbol]
    return dims[0] if len(dims) == 1 else None


def find_parts(graph: fx.Graph, cuts: Cuts) -> dict[fx.Node, int]:
    symbol = token_symbol(graph)
    parts: dict[fx.Node, int] = {}
    for node in graph.nodes:
        dim = token_dim(node, symbol)
        if dim is not None and _is_part(node, dim, cuts, parts):
            parts[node] = dim
    return parts


def _is_part(node: fx.Node, dim: int, cuts: Cuts, parts: Mapping[fx.Node, int]) -> bool:
    if node.op == "placeholder":
        return node.name == "hidden"
    # Regions, from "enter" to products in `rows`, need all tokens.
    if node.target is communicate:
        return bool(operands(node)[1] == "exit")
    if node.op != "call_function" or node in cuts.cut or node in cuts.rows:
        return False
    return any(n in parts for n in node.all_input_nodes) and _tokenwise(node, dim, parts)


def _tokenwise(node: fx.Node, dim: int, parts: Mapping[fx.Node, int]) -> bool:
    # Other operators need all tokens, from an all-gather.
    target = node.target
    first = operands(node)[0]
    if is_pointwise(node):
        ndim = len(shape(node))
        return all(parts[n] + ndim - len(shape(n)) == dim for n in node.all_input_nodes if n in parts)
    if target is aten.cat.default:
        return join_dim(node) != dim
    # Only the first operand may be sharded.
    if first not in parts or any(n in parts for n in node.all_input_nodes if n is not first):
        return False
    if target is dropout:
        return bool(parts[first] == operands(node)[6])
    multiplied = product(node)
    if multiplied is not None:
        return multiplied[0] is first and parts[first] < len(shape(first)) - 1
    if target in NORMS:
        return parts[first] < len(shape(first)) - len(operands(node)[1])
    if target in SOFTMAX:
        return int(operands(node)[1]) % len(shape(first)) != parts[first]
    if target in VIEWS:
        return carried(shape(first), shape(node), parts[first]) == dim
    if target in SPLITS:
        return split_dim(node) != parts[first]
    if target is aten.slice.Tensor:
        return join_dim(node) != parts[first]
    return target in MOVES or target in REDUCTIONS or getattr(target, "__name__", "") == "getitem"


def aligned_dim(node: fx.Node, operand: fx.Node, parts: Mapping[fx.Node, int], symbol: str | None) -> int | None:
    """Return the token dimension of an operand that must be split for `node`, or None."""
    if node.target is dropout and operand is operands(node)[1] and operand not in parts:
        # The dropout's keys are [1, T, 2]
        return 1
    if operand in parts or not (is_pointwise(node) or node.target is aten.cat.default):
        return None
    dim = token_dim(operand, symbol)
    return dim if dim is not None and dim + len(shape(node)) - len(shape(operand)) == parts[node] else None


def learns_in_part(parameter: fx.Node, cuts: Cuts, parts: Mapping[fx.Node, int]) -> tuple[bool, bool]:
    """Return whether some users give a replicated parameter partial gradients, and whether some give full gradients.

    Operators sharded by units or tokens, such as a norm between two regions, give partial gradients.
    """
    users = [_user_has_part(user, cuts, parts) for user in parameter.users]
    return any(users), not all(users)


def _user_has_part(user: fx.Node, cuts: Cuts, parts: Mapping[fx.Node, int]) -> bool:
    if user in cuts.rows:
        return any(n in parts for n in user.users)
    return user in parts or (user in cuts.cut and user not in cuts.columns)

"""Operators registered with PyTorch: what is one, what it promises, and what it takes and returns.

The class of an operator (`torch.ops.aten.mm.default`) and its schema have no public name in any release from 2.11 to
2.15, though none of these changed them; `torch.Tag` is public.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

PACKETS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # an operator, and all operators of one name


class OperatorArgument(NamedTuple):
    """One argument of a call of an operator.

    Attributes:
        name: in the operator's schema.
        value: that the node passes.
        aliased: whether the result is, or holds, a view of it, or the operator writes into it.
        written: whether it writes into it.
    """

    name: str
    value: Any
    aliased: bool
    written: bool


class Signature(NamedTuple):
    """How an operator may be called.

    Attributes:
        names: of its arguments, in order; those from `positional` on are given by name only.
        positional: how many may be given by position.
        required: those without a default.
        types: of its arguments, as PyTorch's schema has them: "Tensor", "Optional[int]", "List[int]".
        pure: it writes into none of its arguments.
    """

    names: tuple[str, ...]
    positional: int
    required: frozenset[str]
    types: tuple[str, ...]
    pure: bool


@functools.cache
def signature_of(target: object) -> Signature:
    """Return how an operator may be called."""
    assert isinstance(target, torch._ops.OpOverload)
    arguments = target._schema.arguments
    return Signature(
        tuple(argument.name for argument in arguments),
        sum(not argument.kwarg_only for argument in arguments),
        frozenset(argument.name for argument in arguments if not argument.has_default_value()),
        tuple(str(argument.real_type) for argument in arguments),
        not target._schema.is_mutable,
    )


def is_operator(target: object) -> bool:
    """Say whether what a node calls is an operator, and not a function of Python's, a method or a module."""
    return isinstance(target, torch._ops.OpOverload)


def full_name(target: object) -> str:
    """Return the name of an operator, by which `torch.ops` finds it again: "aten::mm.default"."""
    assert isinstance(target, torch._ops.OpOverload)
    return f"{target._schema.name}.{target._overloadname}"


def has_tag(target: object, *tags: torch.Tag) -> bool:
    """Say whether what a node calls is an operator with any of some tags."""
    return isinstance(target, torch._ops.OpOverload) and any(tag in target.tags for tag in tags)


def arguments_of(node: fx.Node) -> Iterator[OperatorArgument]:
    """Yield the arguments that a node passes, with what its operator's schema says of them; none if it calls none."""
    if isinstance(node.target, torch._ops.OpOverload):
        for i, argument in enumerate(node.target._schema.arguments):
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if i < len(node.args) or argument.name in node.kwargs:  # out= is one of these
                alias = argument.alias_info
                yield OperatorArgument(argument.name, value, alias is not None, alias is not None and alias.is_write)


def makes_tensors(target: object, namespace: str = "aten") -> bool:
    """Say whether what a node calls is an operator of a namespace that returns tensors, each in memory of its own."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != namespace:
        return False
    tensors = [r for r in target._schema.returns if str(r.type) == "Tensor"]
    return bool(tensors) and all(r.alias_info is None for r in tensors)

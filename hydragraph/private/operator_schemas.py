"""Properties, arguments and results of operators registered with PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

PACKETS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def aten_operators(names: str) -> frozenset[Any]:
    """Return PyTorch operators by name, such as "mean.dim", or "mm" for "mm.default"."""
    parts = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in parts)


class OperatorArgument(NamedTuple):
    """Argument of a call.

    Attributes:
        aliased: whether the operator writes into the argument or may return its memory.
    """

    name: str
    value: Any
    aliased: bool
    written: bool


class Signature(NamedTuple):
    """Signature of an operator.

    Attributes:
        names: names of the arguments, which are keyword-only from index `positional` on.
        types: types in PyTorch's schema, such as "Optional[int]".
        pure: whether the operator leaves arguments unchanged.
    """

    names: tuple[str, ...]
    positional: int
    required: frozenset[str]
    types: tuple[str, ...]
    pure: bool


@functools.cache
def signature_of(target: object) -> Signature:
    assert isinstance(target, torch._ops.OpOverload)
    arguments = target._schema.arguments
    return Signature(
        tuple(argument.name for argument in arguments),
        sum(not argument.kwarg_only for argument in arguments),
        frozenset(argument.name for argument in arguments if not argument.has_default_value()),
        tuple(str(argument.real_type) for argument in arguments),
        not target._schema.is_mutable,
    )


def transforms_functions(target: object) -> bool:
    """Return whether an operator takes functions (torch.cond) or belongs to a transformation (torch.vmap)."""
    return isinstance(target, torch._ops.HigherOrderOperator) or "_functorch" in getattr(target, "__module__", "")


def is_operator(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload)


def full_name(target: object) -> str:
    """Return a name such as "aten::mm.default"."""
    assert isinstance(target, torch._ops.OpOverload)
    return f"{target._schema.name}.{target._overloadname}"


def has_tag(target: object, *tags: torch.Tag) -> bool:
    return isinstance(target, torch._ops.OpOverload) and any(tag in target.tags for tag in tags)


def arguments_of(node: fx.Node) -> Iterator[OperatorArgument]:
    if isinstance(node.target, torch._ops.OpOverload):
        for i, argument in enumerate(node.target._schema.arguments):
            # Arguments may be given by position or name, or keep their defaults.
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if i < len(node.args) or argument.name in node.kwargs:
                alias = argument.alias_info
                yield OperatorArgument(argument.name, value, alias is not None, alias is not None and alias.is_write)


def argument_of(node: fx.Node, *names: str) -> Any:
    """Return the value or default of the first argument with one of these names, else None."""
    if isinstance(node.target, torch._ops.OpOverload):
        for i, argument in enumerate(node.target._schema.arguments):
            if argument.name in names:
                return node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
    return None


def makes_tensors(target: object, namespace: str = "aten") -> bool:
    """Return whether an operator is in a namespace and returns only tensors with their own memory."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != namespace:
        return False
    tensors = [r for r in target._schema.returns if str(r.type) == "Tensor"]
    return bool(tensors) and all(r.alias_info is None for r in tensors)

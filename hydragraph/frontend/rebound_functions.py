"""Rebinding of functions, which `copy.deepcopy` does not copy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from hydragraph.frontend.state_readers import variables_of


def rebind(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Make functions in a copy's attributes refer to copied objects; `memo` is that of `copy.deepcopy`."""
    rebuilt: dict[int, Any] = {}
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                vars(module)[name] = _rebound(value, memo, rebuilt)


def _rebound(value: Any, memo: Mapping[int, Any], rebuilt: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module | Tensor):
        return memo.get(id(value), value)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        items = [_rebound(v, memo, rebuilt) for v in value]
        return type(value)(items) if _differ(items, value) else value
    if type(value) is dict:
        entries = {k: _rebound(v, memo, rebuilt) for k, v in value.items()}
        return entries if _differ(entries.values(), value.values()) else value
    if isinstance(value, MethodType):
        owner = _rebound(value.__self__, memo, rebuilt)
        function = _rebound(value.__func__, memo, rebuilt)
        return value if owner is value.__self__ and function is value.__func__ else MethodType(function, owner)
    if isinstance(value, functools.partial):
        parts = [_rebound(p, memo, rebuilt) for p in (value.func, value.args, value.keywords)]
        return functools.partial(parts[0], *parts[1], **parts[2])
    return _function(value, memo, rebuilt) if isinstance(value, FunctionType) else value


def _function(function: FunctionType, memo: Mapping[int, Any], rebuilt: dict[int, Any]) -> FunctionType:
    known: FunctionType | None = rebuilt.get(id(function))
    if known is not None:
        return known
    # Ends the recursion for a function that references itself.
    rebuilt[id(function)] = function
    variables = variables_of(function)
    names = function.__code__.co_freevars
    old_parts = [list(map(variables.get, names)), function.__defaults__, function.__kwdefaults__, function.__dict__]
    new_parts = [_rebound(h, memo, rebuilt) for h in old_parts]
    if not _differ(new_parts, old_parts):
        return function
    olds = zip(names, function.__closure__ or (), new_parts[0], strict=True)
    closure = tuple(CellType(new) if name in variables else old for name, old, new in olds)
    function_copy = FunctionType(function.__code__, function.__globals__, function.__name__, new_parts[1], closure)
    function_copy.__kwdefaults__ = new_parts[2]
    function_copy.__qualname__ = function.__qualname__
    function_copy.__module__ = function.__module__
    function_copy.__dict__.update(new_parts[3])
    rebuilt[id(function)] = function_copy
    return function_copy


def _differ(one: Any, other: Any) -> bool:
    return any(a is not b for a, b in zip(one, other, strict=True))

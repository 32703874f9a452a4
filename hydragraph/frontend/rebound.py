"""Functions that were copied with a module: what they hold of the original becomes what they hold of its copy.

`copy.deepcopy` copies functions by reference. A forward that is set on an instance is often a closure, or has defaults
that hold the old forward (`lambda x, old=block.forward: 2 * old(x)`), and would run the original's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def rebind(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Rebind the functions among the attributes of all modules of a deep copy.

    Args:
        memo: as `copy.deepcopy` left it: id of an original -> its copy.
    """
    known: dict[int, Any] = {}
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | MethodType | functools.partial):
                vars(module)[name] = _rebound(value, memo, known)


def _rebound(value: Any, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """Return a value with modules and tensors of the original replaced, itself where it holds none."""
    if isinstance(value, nn.Module | Tensor):
        return memo.get(id(value), value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        items = [_rebound(v, memo, known) for v in value]
        return type(value)(items) if _differ(items, value) else value
    if type(value) is dict:
        found = {k: _rebound(v, memo, known) for k, v in value.items()}
        return found if _differ(found.values(), value.values()) else value
    if isinstance(value, MethodType):
        owner = _rebound(value.__self__, memo, known)
        function = _rebound(value.__func__, memo, known)
        return value if owner is value.__self__ and function is value.__func__ else MethodType(function, owner)
    if isinstance(value, functools.partial):
        parts = [_rebound(p, memo, known) for p in (value.func, value.args, value.keywords)]
        return functools.partial(parts[0], *parts[1], **parts[2])
    return _function(value, memo, known) if isinstance(value, FunctionType) else value


def _function(function: FunctionType, memo: Mapping[int, Any], known: dict[int, Any]) -> FunctionType:
    if id(function) in known:
        return known[id(function)]  # type: ignore[no-any-return]
    known[id(function)] = function  # a function may hold itself
    cells = [_content(cell) for cell in function.__closure__ or ()]
    held = [cells, function.__defaults__, function.__kwdefaults__, function.__dict__]
    made = [_rebound(h, memo, known) for h in held]
    if not _differ(made, held):
        return function
    pairs = zip(function.__closure__ or (), made[0], strict=True)
    closure = tuple(old if _is_empty(old) else CellType(new) for old, new in pairs)
    found = FunctionType(function.__code__, function.__globals__, function.__name__, made[1], closure)
    found.__kwdefaults__, found.__qualname__, found.__module__ = made[2], function.__qualname__, function.__module__
    found.__dict__.update(made[3])
    known[id(function)] = found
    return found


def _differ(one: Any, other: Any) -> bool:
    return any(a is not b for a, b in zip(one, other, strict=True))


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  it raises
    except ValueError:
        return True
    return False


def _content(cell: CellType) -> Any:
    return None if _is_empty(cell) else cell.cell_contents

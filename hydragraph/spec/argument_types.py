"""Checks of arguments of public functions and dataclasses against their annotations."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

P = ParamSpec("P")
T = TypeVar("T")


def typed(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        where = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            # Python reports missing and unknown arguments.
            except TypeError:
                return function(*args, **kwargs)
            check_types(f"{where}: ", {name: given[name] for name in names if name in given}, function)
            return function(*args, **kwargs)

        return call

    return wrap


def check_types(where: str, given: Mapping[str, object], owner: Any) -> None:
    for name, value in given.items():
        # Annotations are texts (PEP 563), valid in their owner's module.
        text = owner.__annotations__[name]
        if not _fits(value, eval(text, vars(sys.modules[owner.__module__]))):
            shown = " ".join(reprlib.repr(value).split())
            raise ValueError(f"{where}{name!r} is {shown}: give {text.replace(' | ', ' or ')}")


def _fits(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if kind is None:
        return value is None
    # NumPy's integers count as int; True does not.
    if kind is int:
        return hasattr(value, "__index__") and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is Sequence:
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            return False
        (item,) = get_args(hint)
        return get_origin(item) is None or all(_fits(part, item) for part in value)
    return not isinstance(kind, type) or isinstance(value, kind)

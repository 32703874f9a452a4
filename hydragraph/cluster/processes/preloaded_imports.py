"""Preloading of transformers classes named in the ranks' function, before ranks are forked.

    def train():
        from transformers import LlamaForCausalLM       each of 32 ranks would import this large module separately

Other modules are not imported, because imports may compute or start threads.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARY = "transformers"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def classes_named_in(*functions: Callable[..., Any]) -> frozenset[str]:
    """Return the classes named in `functions` and in the user's functions that they use."""
    named: set[str] = set()
    for code in _codes(functions):
        if any(module.partition(".")[0] == _LIBRARY for module in code.co_names):
            named |= {name for name in code.co_names if name[:1].isupper()}
    return frozenset(named)


def import_named(classes: Collection[str]) -> None:
    if not classes:
        return
    with suppress(Exception):
        import transformers

        for name in sorted(classes):
            with suppress(Exception):
                getattr(transformers, name)


def _codes(functions: Collection[Callable[..., Any]]) -> Iterator[CodeType]:
    pending: list[object] = list(functions)
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for code in _within(function.__code__):
            yield code
            names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
            near = [function.__globals__.get(name) for name in names]
            modules = [value for value in near if isinstance(value, ModuleType) and _by_users(value)]
            near += [vars(module).get(name) for module in modules for name in code.co_names]
            pending += [value for value in near if _by_users(sys.modules.get(getattr(value, "__module__", None) or ""))]
        for cell in function.__closure__ or ():
            with suppress(ValueError):
                pending.append(cell.cell_contents)


def _by_users(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    if path is None:
        return module is sys.modules["__main__"]
    # With --system-site-packages, packages are outside `_INSTALLED`.
    return not (path.startswith(_INSTALLED) or "site-packages" in path or "dist-packages" in path)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)

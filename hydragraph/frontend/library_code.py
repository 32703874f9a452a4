"""Detection of code, such as patches, from outside a model's libraries."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from hydragraph.frontend.state_readers import PLAIN, file_of, globals_of, names_of, variables_of

_FOLLOWED = ("transformers", "peft")
_LIBRARIES = ("hydragraph", "numpy", "packaging", "torch", *_FOLLOWED)
_STDLIB = f"{sysconfig.get_path('stdlib')}/"


class LibraryCode:
    """Code and values that a model's forward may reach through names.

    Attributes:
        patches: (location, object) of objects defined outside the libraries.
        values: (location, repr) of constants.
    """

    def __init__(self, model: nn.Module) -> None:
        self.patches: list[tuple[str, Any]] = []
        self.values: set[tuple[str, str]] = set()
        self._seen: dict[int, Any] = {}
        self._pending: list[tuple[str, Any]] = []
        packages = [sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules]
        self._folders = tuple(f"{Path(file).parent}/" for file in packages if file is not None)
        # Follow every name that a forward can reach, from the classes of the model's modules.
        kinds = (k for module in model.modules() for k in type(module).__mro__[:-1] if k is not nn.Module)
        self._kinds = list(dict.fromkeys(kinds))
        for kind in self._kinds:
            self._pending.append((_name(kind), kind))
            if "forward" in vars(kind):
                self._pending.append((f"{_name(kind)}.forward", vars(kind)["forward"]))
        while self._pending:
            where, value = self._pending.pop()
            if isinstance(value, PLAIN):
                self.values.add((where, repr(value)))
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                self._follow(where, value)

    def _follow(self, where: str, value: Any) -> None:
        inner = [(where, inner_value) for inner_value in _inside(value)]
        if isinstance(value, FunctionType):
            self._add_function(where, value)
        elif isinstance(value, type) or (
            callable(value) and not isinstance(value, (ModuleType, Mapping)) and not inner
        ):
            kind = value if isinstance(value, type) else type(value)
            if not self._is_of_library(kind.__module__, file_of(kind)):
                self.patches.append((where, value))
        self._pending += inner

    def _add_function(self, where: str, function: FunctionType) -> None:
        if not self._is_of_library(function.__module__, function.__code__.co_filename):
            self.patches.append((where, function))
            return
        self._pending += [(f"{where}: {name}", value) for name, value in variables_of(function).items()]
        self._pending += [(where, default) for default in function.__defaults__ or ()]
        package = (function.__module__ or "").partition(".")[0]
        method = where.rpartition(".")[0] in {_name(kind) for kind in self._kinds}
        if not (package in _FOLLOWED or method):
            return
        names = set(names_of(function.__code__))
        for name, value in globals_of(function).items():
            self._pending.append((f"{function.__module__}.{name}", value))
            if isinstance(value, ModuleType):
                self._add_attributes(value, names)
        if package in _FOLLOWED:
            for kind in self._kinds:
                self._pending += [(f"{_name(kind)}.{n}", vars(kind)[n]) for n in names & vars(kind).keys()]

    def _is_of_library(self, module: str | None, file: str | None) -> bool:
        # C or generated code, such as a dataclass's
        if file is None or file.startswith("<"):
            return (module or "").partition(".")[0] in {*_LIBRARIES, *sys.stdlib_module_names, "builtins"}
        stdlib = file.startswith(_STDLIB) and "site-packages" not in file
        return stdlib or file.startswith(self._folders)

    def _add_attributes(self, module: ModuleType, names: set[str]) -> None:
        for name in names & vars(module).keys():
            value = vars(module)[name]
            self._pending.append((f"{module.__name__}.{name}", value))
            if isinstance(value, ModuleType) and value is not module and value.__name__.startswith("torch.nn"):
                self._add_attributes(value, names)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if f is not None)
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, dict):
        yield from (function for function in value.values() if callable(function))
    elif not isinstance(value, type) and isinstance(getattr(value, "__wrapped__", None), FunctionType):
        yield value.__wrapped__


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

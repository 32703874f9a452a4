"""Analysis of the names that the code of a model and its loss can read."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

# Code that mentions one of these names may read any attribute.
_DYNAMIC = frozenset({"vars", "__dict__", "attrgetter", "eval", "exec"})
_LIBRARIES = ("torch", "transformers", "peft", "hydragraph", "builtins", "numpy")
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_RATES = ("drop", "jitter", "noise")


def library_of(kind: type) -> str | None:
    """Return the library that defines a class, or None for a user's class."""
    package = kind.__module__.partition(".")[0]
    return package if package in _LIBRARIES else None


def base_library_of(kind: type) -> str | None:
    """Return the library of the first class in the MRO that comes from a library, except nn.Module."""
    return next((library for k in kind.__mro__ if k not in (nn.Module, object) and (library := library_of(k))), None)


def is_installed(kind: type) -> bool:
    return kind.__module__ == "builtins" or (file_of(kind) or "").startswith(_INSTALLED)


def file_of(thing: Any) -> str | None:
    return getattr(sys.modules.get(thing.__module__), "__file__", None)


class Readers:
    """The user's functions that compute a model and its loss.

    Attributes:
        names: every name and string constant in these functions.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.functions: dict[int, FunctionType] = {}
        self.names = {"forward"}
        self._dynamic = False
        kinds = [k for module in model.modules() for k in type(module).__mro__]
        self.classes = list(dict.fromkeys(k for k in kinds if library_of(k) is None))
        for module in model.modules():
            if type(module) in self.classes or "forward" in vars(module):
                self._add(_functions(module.forward))
        if isinstance(loss, nn.Module):
            for module in loss.modules():
                self._add_callable(module)
        elif loss is not None:
            self._add_callable(loss)

    def reads(self, name: str) -> bool:
        return self._dynamic or name in self.names

    def depends_on_training(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether the user's code may depend on `training`; dropout with a rate of 0 does not count."""
        if "training" not in self.names:
            return False
        if any(rate for module in modules for rate in rates_of(module).values()):
            return True
        return any("training" in names_of(f.__code__) and not _beside_a_rate(f) for f in self.functions.values())

    @property
    def depends_on_training_without_dropout(self) -> bool:
        calls = True
        return any("training" in names_of(f.__code__) and not _beside_a_rate(f, calls) for f in self.functions.values())

    def _add_callable(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            self._add_callable(function.func)
            return
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, FunctionType | type):
            self.classes += [k for k in type(owner).__mro__ if library_of(k) is None and k not in self.classes]
        if not isinstance(function, MethodType | FunctionType):
            function = getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
        self._add(_functions(function))

    def _add(self, functions: Iterable[FunctionType]) -> None:
        pending = list(functions)
        while pending:
            function = pending.pop()
            if id(function) in self.functions or not _is_users(function):
                continue
            self.functions[id(function)] = function
            names = set(names_of(function.__code__))
            self.names |= names
            self._dynamic |= not names.isdisjoint(_DYNAMIC) or ("getattr" in names and not _spells_names(function))
            pending += [f for k in self.classes for n in names & vars(k).keys() for f in _functions(vars(k)[n])]
            values = [*globals_of(function).values(), *(c.cell_contents for c in cells_of(function).values())]
            pending += [f for value in values for f in _functions(value)]


def globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads, without builtins."""
    instructions = (instruction for code in _codes(function.__code__) for instruction in dis.get_instructions(code))
    names = [instruction.argval for instruction in instructions if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def cells_of(function: FunctionType) -> dict[str, CellType]:
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            _ = cell.cell_contents
        except ValueError:
            continue
        cells[name] = cell
    return cells


def mentions(kind: type, name: str) -> bool:
    methods = [value for k in kind.__mro__ if k not in (object, nn.Module) for value in vars(k).values()]
    return hasattr(kind, name) or any(name in names_of(f.__code__) for m in methods for f in _functions(m))


def rates_of(module: nn.Module) -> dict[str, float]:
    """Return a module's rates of dropout or noise, by attribute name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and (any(part in name for part in _RATES) or (name == "p" and "Dropout" in type(module).__name__))
    }


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names in code, and the string constants, which `getattr` may read."""
    for code_object in _codes(code):
        yield from code_object.co_names
        yield from (constant for constant in code_object.co_consts if isinstance(constant, str))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(value: Any) -> Iterator[FunctionType]:
    inner = value.fget if isinstance(value, property) else value
    if isinstance(inner, MethodType | staticmethod | classmethod):
        inner = inner.__func__
    if isinstance(inner, FunctionType):
        yield inner


def _is_users(function: FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package not in _LIBRARIES and not function.__code__.co_filename.startswith(_INSTALLED)


def _syntax(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _spells_names(function: FunctionType) -> bool:
    tree = _syntax(function)
    if tree is None:
        return False
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 1]
    spelled = {id(n.func) for n in calls if isinstance(n.args[1], ast.Constant)}
    return all(id(n) in spelled for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "getattr")


def _beside_a_rate(function: FunctionType, calls: bool = False) -> bool:
    """Return whether `training` occurs only next to rates and, if `calls`, in calls to functions such as dropout."""
    tree = _syntax(function)
    if tree is None:
        return False
    flags = {n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "training"}
    beside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.IfExp):
            inside = set(ast.walk(node))
            called = set() if calls else {n.func for n in inside if isinstance(n, ast.Call)}
            attributes = [n.attr for n in inside if isinstance(n, ast.Attribute) and n not in called]
            attributes += [n.id for n in inside if calls and isinstance(n, ast.Name)]
            if any(part in name for name in attributes for part in _RATES):
                beside |= inside & flags
    return bool(flags) and beside == flags

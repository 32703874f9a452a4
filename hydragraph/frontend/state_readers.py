"""Analysis of the names that the code of a model and its loss can read."""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import functools
import inspect
import operator
import sys
import sysconfig
import textwrap
import weakref
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported

# Code with one of these names may read any attribute.
_DYNAMIC = frozenset({"vars", "__dict__", "attrgetter", "eval", "exec"})
_LIBRARIES = ("torch", "transformers", "peft", "hydragraph", "builtins", "numpy")
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_RATES = ("drop", "jitter", "noise")
SEQUENCES = (
    *(list, tuple, set, frozenset, collections.deque, collections.UserList),
    *(weakref.WeakSet, KeysView, ValuesView, ItemsView),
)
ATOMS: frozenset[type] = frozenset({bool, int, float, complex, str, bytes, type(None)})
PLAIN: tuple[type, ...] = (*ATOMS, torch.dtype, torch.device)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Name prefixes of classes whose objects may be changed outside the model.
_LIVE = (
    *("torch.optim.", "torch._C.Generator", "threading.Event", "queue.", "multiprocessing.", "ctypes."),
    *("_thread._local", "_contextvars.ContextVar", "os._Environ"),
)
_CLOCKS = {
    f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")
} | {"now", "utcnow", "today"}
_TRACING = frozenset({"is_compiling", "is_exporting", "is_tracing", "is_dynamo_compiling", "is_meta"})
_SETTINGS = frozenset({"initial_seed", "get_rng_state", "get_num_threads", "are_deterministic_algorithms_enabled"})
_FILES = frozenset({"read_text", "read_bytes"})
_AS_A_FIELD = "pass its values as a batch field (example=), or read them once before hg.compile"
_NOT_FOLLOWED = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__"}) | {
    *("__annotations__", "__dataclass_fields__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__del__"),
    *("__getstate__", "__setstate__", "__reduce__"),
}


def library_of(kind: type) -> str | None:
    package = kind.__module__.partition(".")[0]
    return package if package in _LIBRARIES else None


def base_library_of(kind: type) -> str | None:
    """Return the library of the first library class in the MRO, except nn.Module, or None."""
    return next((library for k in kind.__mro__ if k not in (nn.Module, object) and (library := library_of(k))), None)


def is_installed(kind: type) -> bool:
    return kind.__module__ == "builtins" or (file_of(kind) or "").startswith(_INSTALLED)


def file_of(thing: Any) -> str | None:
    return getattr(sys.modules.get(thing.__module__), "__file__", None)


class UserFunctions:
    """The user's functions that compute a model and its loss.

    Attributes:
        names: every name and string constant in these functions.
        modules: for each Python module, its names that they may read.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.functions: dict[int, FunctionType] = {}
        self.modules: dict[ModuleType, set[str]] = {}
        self.names: set[str] = set()
        self._dynamic = False
        self._where = type(model).__name__
        kinds = [k for module in model.modules() for k in type(module).__mro__]
        self.classes = list(dict.fromkeys(k for k in kinds if library_of(k) is None))
        self._owners: dict[int, Any] = {id(m): m for m in model.modules() if library_of(type(m)) is None}
        self._seen: dict[int, Any] = {}
        self._pending = [m.forward for m in model.modules() if type(m) in self.classes or "forward" in vars(m)]
        self._pending += loss.modules() if isinstance(loss, nn.Module) else [loss]
        self._follow()

    def reads(self, name: str) -> bool:
        return self._dynamic or name in self.names or name == "forward"

    def depends_on_training(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether the user's code may depend on `training`, beyond dropout with a rate of 0."""
        if "training" not in self.names:
            return False
        if any(rate for module in modules for rate in rates_of(module).values()):
            return True
        return self._reads_training(calls=False)

    @property
    def depends_on_training_without_dropout(self) -> bool:
        return self._reads_training(calls=True)

    def _reads_training(self, calls: bool) -> bool:
        return any("training" in names_of(f.__code__) and not _beside_a_rate(f, calls) for f in self.functions.values())

    def _follow(self) -> None:
        # Followed values mention new names, which reach more values: alternate both searches until
        # neither finds a new one.
        while self._pending:
            while self._pending:
                value = self._pending.pop()
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._find(value)
            found = [v for owner in self._owners.values() for n, v in attributes_of(owner).items() if self.reads(n)]
            found += [vars(k)[n] for k in self.classes for n in self.names & vars(k).keys()]
            found += [vars(module)[n] for module, names in self.modules.items() for n in names]
            self._pending = [value for value in found if id(value) not in self._seen]

    def _find(self, value: Any) -> None:
        value = referent(value)
        self._pending += parts_of(value).values()
        for function in functions_in(value):
            self._add(function)
        owner: Any = value.__self__ if isinstance(value, MethodType) else value
        if not isinstance(owner, nn.Module):
            _refuse_live(owner, self._where)
        if isinstance(value, functools.partial):
            self._pending += [value.func, *value.args, *value.keywords.values()]
            # A text argument may be an attribute's (dotted) name.
            self.names |= {part for name in value.args if isinstance(name, str) for part in name.split(".")}
        elif isinstance(value, operator.attrgetter):
            self._dynamic = True
        elif type(value).__module__ == "functools":
            # `functools.lru_cache` and similar objects keep the wrapped function in `__dict__`.
            self._pending += _wrapped(getattr(value, "__dict__", {}).values())
        elif isinstance(owner, type):
            self._add_class(owner)
        elif isinstance(owner, nn.Module) or has_state(owner):
            self._owners[id(owner)] = owner
            self._add_class(type(owner))
            self._pending += [value.forward] if isinstance(value, nn.Module) else []

    def _add_class(self, kind: type) -> None:
        for k in (*kind.__mro__, *inspect.getmro(type(kind))):
            if library_of(k) is None and not is_installed(k) and k not in self.classes:
                self.classes.append(k)
                self._pending += [v for n, v in vars(k).items() if n.startswith("__") and n not in _NOT_FOLLOWED]

    def _add(self, function: FunctionType) -> None:
        # A library's wrapper, such as a decorator's, may contain the user's function.
        if not _is_users(function):
            self._pending += _wrapped([*vars(function).values(), *variables_of(function).values()])
            return
        if id(function) in self.functions:
            return
        _refuse_outside(function)
        self.functions[id(function)] = function
        names = set(names_of(function.__code__))
        self.names |= names
        if not function.__name__.startswith("__") or function.__name__ == "__call__":
            self._dynamic |= not names.isdisjoint(_DYNAMIC) or ("getattr" in names and not _spells_names(function))
        values = [*globals_of(function).values(), *vars(function).values(), *defaults_of(function).values()]
        values += variables_of(function).values()
        self._pending += values
        for module in [*values, *_imported(function)]:
            self._add_module(module, names)

    def _add_module(self, module: Any, names: set[str]) -> None:
        if isinstance(module, ModuleType) and _is_users_module(module):
            known = self.modules.setdefault(module, set())
            new = (names & vars(module).keys()) - known
            known |= new
            for name in new:
                self._add_module(vars(module)[name], names)


def referent(value: Any) -> Any:
    """Dereference a weak reference, proxy or built-in method; return other values unchanged."""
    # A proxy's methods are bound to its referent.
    if type(value) in weakref.ProxyTypes:
        return value.__init__.__self__
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType | type | None):
        return value.__self__
    return value() if isinstance(value, weakref.ref) else value


def _wrapped(values: Iterable[Any]) -> list[Any]:
    inside = [part for value in values for part in (value.values() if type(value) is dict else [value])]
    return [part for part in inside if isinstance(part, (FunctionType, MethodType, functools.partial))]


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Return a container's entries by key or index, without numbers and texts."""
    if isinstance(value, Mapping):
        parts = dict(value)
    else:
        parts = dict(enumerate(value)) if isinstance(value, SEQUENCES) else {}
    return {key: part for key, part in parts.items() if type(part) not in ATOMS}


def _refuse_live(value: Any, where: str) -> None:
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]
    own = has_state(value) and not is_installed(type(value))
    if any(name.startswith(_LIVE) for name in names) or (isinstance(value, Iterator) and not own):
        what = f"the model or loss reads a {names[0]}, whose changes a compiled graph would ignore"
        raise Unsupported(what, where=where, remedy=_AS_A_FIELD)


def _refuse_outside(function: FunctionType) -> None:
    names = set(names_of(function.__code__))
    where = function.__qualname__
    if asked := names & _TRACING:
        what = f"the function asks whether it is traced ({asked.pop()}), so the trace may differ from PyTorch's results"
        raise Unsupported(what, where=where, remedy="compute the same whether traced or not")
    called = set(_arguments_of(function, "LOAD_GLOBAL", "LOAD_NAME")) - function.__globals__.keys()
    reads = {
        "environment variables": names & {"environ", "getenv"},
        "a clock": _asks_clocks(function, names),
        "settings of PyTorch": names & _SETTINGS,
        "a file": names & _FILES or "open" in called,
        "variables by globals()": "globals" in called,
    }
    for read in (what for what, found in reads.items() if found):
        raise Unsupported(f"the function reads {read}, but a compiled graph would not", where=where, remedy=_AS_A_FIELD)


def _asks_clocks(function: FunctionType, names: set[str]) -> bool:
    for value in [*globals_of(function).values(), *variables_of(function).values(), *_imported(function)]:
        if isinstance(value, BuiltinMethodType) and value.__module__ == "time" and value.__name__ in _CLOCKS:
            return True
        if isinstance(value, ModuleType | type) and not names.isdisjoint(_CLOCKS):
            source = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if source in ("time", "datetime"):
                return True
    return False


def has_state(value: Any) -> bool:
    apart = nn.Module | Tensor | type | FunctionType | MethodType | ModuleType
    if isinstance(value, apart) or not (hasattr(value, "__dict__") or hasattr(value, "__slots__")):
        return False
    return library_of(type(value)) in (None, "transformers")


def attributes_of(owner: Any) -> Mapping[str, Any]:
    attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
    if isinstance(owner, nn.Module | type):
        return attributes
    # Attributes in `__slots__` are in the classes, not in `__dict__`.
    members = [n for k in type(owner).__mro__ for n, v in vars(k).items() if isinstance(v, MemberDescriptorType)]
    slots = [n for n in members if not n.startswith("__") and hasattr(owner, n)]
    return {**attributes, **{n: getattr(owner, n) for n in slots}} if slots else attributes


def globals_of(function: FunctionType) -> dict[str, Any]:
    names = _arguments_of(function, "LOAD_GLOBAL", "LOAD_NAME")
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _imported(function: FunctionType) -> list[ModuleType]:
    names = {part for name in _arguments_of(function, "IMPORT_NAME") for part in (name, name.partition(".")[0])}
    return [sys.modules[name] for name in names if name in sys.modules]


def _arguments_of(function: FunctionType, *operations: str) -> tuple[Any, ...]:
    return _arguments(function.__code__, operations)


@functools.cache
def _arguments(function: CodeType, operations: tuple[str, ...]) -> tuple[Any, ...]:
    instructions = (instruction for code in _codes(function) for instruction in dis.get_instructions(code))
    return tuple(instruction.argval for instruction in instructions if instruction.opname in operations)


def variables_of(function: FunctionType) -> dict[str, Any]:
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


def defaults_of(function: FunctionType) -> dict[str, Any]:
    code, values = function.__code__, function.__defaults__ or ()
    # Defaults belong to the last positional arguments.
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=False)), **(function.__kwdefaults__ or {})}


def mentions(kind: type, name: str) -> bool:
    methods = [value for k in kind.__mro__ if k not in (object, nn.Module) for value in vars(k).values()]
    return hasattr(kind, name) or any(name in names_of(f.__code__) for m in methods for f in functions_in(m))


def rates_of(module: nn.Module) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and (any(part in name for part in _RATES) or (name == "p" and "Dropout" in type(module).__name__))
    }


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names and string constants in code; `getattr` may use a constant as a name."""
    for code_object in _codes(code):
        yield from code_object.co_names
        yield from (constant for constant in code_object.co_consts if isinstance(constant, str))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def functions_in(value: Any) -> Iterator[FunctionType]:
    inner = value.fget if isinstance(value, property) else value
    if isinstance(inner, (MethodType, staticmethod, classmethod)):
        inner = inner.__func__
    if isinstance(inner, FunctionType):
        yield inner


def _is_users(function: FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package not in _LIBRARIES and not function.__code__.co_filename.startswith(_INSTALLED)


def _is_users_module(module: ModuleType) -> bool:
    package = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None) or ""
    return package not in _LIBRARIES and package not in sys.stdlib_module_names and not file.startswith(_INSTALLED)


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


def _beside_a_rate(function: FunctionType, calls: bool) -> bool:
    tree = _syntax(function)
    if tree is None:
        return False
    flags = {n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "training"}
    # beside: reads of `training` in an expression that also names a rate, e.g. in F.dropout(x,
    # self.dropout, self.training).
    beside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.IfExp):
            inside = set(ast.walk(node))
            # A called function's name, as F.dropout, counts only with `calls`.
            called = set() if calls else {n.func for n in inside if isinstance(n, ast.Call)}
            attributes = [n.attr for n in inside if isinstance(n, ast.Attribute) and n not in called]
            attributes += [n.id for n in inside if calls and isinstance(n, ast.Name)]
            if any(part in name for name in attributes for part in _RATES):
                beside |= inside & flags
    return bool(flags) and beside == flags

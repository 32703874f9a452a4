"""Digest of a module without its weights."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hydragraph.frontend.state_readers import PLAIN, UserFunctions, base_library_of, globals_of, variables_of
from hydragraph.private.operator_schemas import PACKETS

_PLAIN: tuple[type, ...] = (*PLAIN, torch.Size, range, slice, EllipsisType)
_TENSORS = ("_parameters", "_buffers", "_modules")
LAYER_INDEX = ("layer_idx", "layer_id", "layer_number")
_BY_THE_WAY = ("_original_object_hash", "_is_hf_initialized")  # attributes that do not describe a module
# Class members that do not describe it, or differ between processes.
_NOT_DESCRIBED = frozenset({"__dict__", "__weakref__", "__doc__", "_abc_impl", "__orig_bases__", "__parameters__"}) | {
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
# Py_TPFLAGS_HEAPTYPE, set for classes defined in Python
_HEAP = 1 << 9
# Maximum number of values; larger structures and tensors count as unique
_LARGEST = 20_000


def structure(value: object, index: bool = True, constants: bool = False) -> str:
    """Return a digest of a value's structure; a value that cannot be described gets a unique digest.

    Args:
        index: whether to include `LAYER_INDEX` attributes.
        constants: whether to include the elements of tensors that are not on the meta device.
    """
    return hashlib.sha256(_Describer(index, constants=constants).text(value).encode()).hexdigest()


def read_by(model: nn.Module, loss: Any) -> str:
    """Return a digest of a loss, and of what it and the user's forward read outside the model."""
    readers = UserFunctions(model, loss)
    functions = readers.functions.values()
    # The order of functions may differ between processes.
    ordered = sorted(functions, key=lambda f: (f.__module__, f.__qualname__, f.__code__.co_firstlineno))
    owners: list[tuple[str, Mapping[str, Any], Callable[[str], bool]]] = []
    owners += [(k.__qualname__, vars(k), readers.reads) for k in readers.classes]
    owners += [(m.__name__, vars(m), names.__contains__) for m, names in readers.modules.items()]
    plain = [
        (where, {n: v for n, v in values.items() if reads(n) and isinstance(v, _PLAIN) and not n.startswith("__")})
        for where, values, reads in owners
    ]
    read = (loss, [(f.__qualname__, globals_of(f)) for f in ordered], sorted(plain, key=repr))
    return hashlib.sha256(_Describer(True, readers.reads).text(read).encode()).hexdigest()


def outline(module: nn.Module) -> str:
    """Describe a block's submodules and plain attributes; equally described blocks usually return equal structures."""
    inside = [(name, type(child).__qualname__) for name, child in module.named_modules()]
    own = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN) and k not in LAYER_INDEX}
    return repr((inside, sorted(own.items(), key=lambda item: item[0])))


class _Describer:
    def __init__(self, index: bool, reads: Callable[[str], bool] = lambda _: True, constants: bool = False) -> None:
        # Decides which attributes of the user's objects are described
        self._reads = reads
        self._constants = constants
        self._left_out = () if index else LAYER_INDEX
        # id -> number and object; the reference prevents the reuse of the id.
        self._known: dict[int, tuple[int, Any]] = {}

    def text(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        # A repeated reference becomes a number, which describes sharing and ends cycles.
        if id(value) in self._known:
            return f"#{self._known[id(value)][0]}"
        self._known[id(value)] = len(self._known), value
        if len(self._known) > _LARGEST:
            return _identity(value)
        return self._content(value)

    def _content(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, nn.Module):
            own = {k: v for k, v in self._own(value).items() if k not in _TENSORS and k not in self._left_out}
            return f"{self.text(type(value))} {self._items(own)} {[self._items(vars(value)[k]) for k in _TENSORS]}"
        if is_lazy(value):
            return f"{kind} without a shape"
        if isinstance(value, Tensor):
            form = f"{kind} {list(value.shape)} {value.dtype} {value.requires_grad}"
            return f"{form} {_elements(value)}" if self._constants and not value.is_meta else form
        if isinstance(value, dict):
            return f"{kind} {self._items(value)}{self._added(value)}"
        if isinstance(value, (list, tuple)):
            return f"{kind} [{', '.join(map(self.text, value))}]{self._added(value)}"
        if isinstance(value, (set, frozenset)):
            return f"{kind} {sorted(map(self.text, value))}{self._added(value)}"
        if isinstance(value, np.ndarray | np.generic):
            return f"{kind} {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, functools.partial):
            return f"{kind} {self.text((value.func, value.args, value.keywords))}"
        if isinstance(value, MethodType):
            return f"{kind} {self.text(value.__func__)} {self.text(value.__self__)}"
        if isinstance(value, property):
            return f"{kind} {self.text((value.fget, value.fset, value.fdel))}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{kind} {self.text(value.__func__)}"
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType | logging.Logger):
            return f"{kind} {getattr(value, '__name__', None) or value.name}"
        if isinstance(value, MemberDescriptorType):
            return f"{kind} {value.__name__}"
        if isinstance(value, (BuiltinFunctionType, *PACKETS)):
            return f"{kind} {value}" if "0x" not in str(value) else _identity(value)
        if hasattr(value, "__dict__") and _is_of_python(type(value)):
            return f"{self.text(type(value))} {self._items(self._own(value))}"
        return _identity(value)

    def _own(self, value: Any) -> dict[str, Any]:
        users = base_library_of(type(value)) is None
        return {name: part for name, part in vars(value).items() if not users or self._reads(name)}

    def _added(self, value: Any) -> str:
        own = self._items(getattr(value, "__dict__", None) or {})
        return f" {own}" if own else ""

    def _items(self, value: Any) -> str:
        return ", ".join(f"{self.text(k)}: {self.text(v)}" for k, v in value.items() if k not in _BY_THE_WAY)

    def _function(self, function: FunctionType) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        variables = variables_of(function)
        closure = [variables.get(name, "empty") for name in function.__code__.co_freevars]
        state = self.text((function.__defaults__, function.__kwdefaults__, closure, function.__dict__))
        return f"{name} {self._code(function.__code__)} {state}"

    def _code(self, code: CodeType) -> str:
        constants = [self._code(c) if isinstance(c, CodeType) else self.text(c) for c in code.co_consts]
        return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"

    def _class(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not kind.__flags__ & _HEAP or _is_importable(kind):
            return name
        members = {k: v for k, v in vars(kind).items() if k not in _NOT_DESCRIBED}
        return f"{name} {[self.text(base) for base in kind.__bases__]} {self._items(members)}"


def _is_of_python(kind: type) -> bool:
    new: Any = kind.__new__
    ours = new is object.__new__ or isinstance(new, FunctionType)
    heap = all(base is object or base.__flags__ & _HEAP for base in kind.__mro__)
    return ours and heap and not any("__slots__" in vars(base) for base in kind.__mro__)


def _is_importable(kind: type) -> bool:
    value: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is kind


def _elements(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.numel() > _LARGEST:
        return _identity(tensor)
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _identity(value: Any) -> str:
    return f"{type(value).__qualname__} at {id(value)}"

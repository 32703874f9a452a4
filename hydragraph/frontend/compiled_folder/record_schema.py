"""Schema of a compiled folder's data; invalid data raises MalformedRecord."""

from __future__ import annotations

import base64
import binascii
import functools
import keyword
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import fx

from hydragraph.frontend.compiled_folder.allowed_operators import ON_COLLECTIVES, ON_STARTED, ON_SUMS, check_call
from hydragraph.passes.differentiate import COLLECTIVES
from hydragraph.private.graph_values import LARGEST_SIZE, size_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)

Value = TypeVar("Value")
LARGEST_CONSTANT = 1 << 24  # bytes
MOST_NODES = 1 << 18  # per graph
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_DEVICE = re.compile(r"(cpu|meta|cuda(:\d{1,4})?)")
_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "strided"})

# Maximum absolute values; JSON numbers can be larger.
_MOST: Mapping[type, float] = {bool: 1, int: 1 << 63, float: sys.float_info.max}


class MalformedRecord(ValueError):  # noqa: N818
    """Data that does not match the schema."""


def refuse(where: str, what: str) -> NoReturn:
    raise MalformedRecord(f"{where}: {what}")


def fields(value: object, names: Collection[str], where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        contents = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)[:80]
        refuse(where, f"expected the fields {', '.join(names)}, but found {contents or 'nothing'}")
    return value


def mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        example = '{"NAME": ...}, as hydragraph compile writes it'
        refuse(where, f"expected a mapping of names, but it is {value!r:.80}: give {example}")
    return value


def _instance(value: object, kind: type[Value], expected: str, where: str) -> Value:
    if not isinstance(value, kind):
        refuse(where, f"expected {expected}, but it is {value!r:.80}")
    return value


def listed(value: object, where: str) -> list[Any]:
    return _instance(value, list, "a list", where)


def text(value: object, where: str) -> str:
    return _instance(value, str, "a text", where)


def whole(value: object, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_SIZE:
        refuse(where, f"expected a whole number of at least {least}, but it is {value!r:.80}")
    return value


def wholes(value: object, where: str, least: int = 0) -> tuple[int, ...]:
    return tuple(whole(number, where, least) for number in listed(value, where))


def flag(value: object, where: str) -> bool:
    return _instance(value, bool, "true or false", where)


def dtype(value: object, where: str) -> torch.dtype:
    if not isinstance(value, str) or value not in _DTYPES:
        refuse(where, f"{value!r:.80} is not a dtype: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[value]


def record(kind: type[Record], value: object, where: str) -> Record:
    types = _types(kind)
    parts = built_fields(kind, fields(value, types, where), types, where)
    try:
        return kind(**parts)
    except ValueError as error:
        raise MalformedRecord(f"{where}: {error}") from None


def built_fields(kind: type, data: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    return {name: built(_types(kind)[name], data[name], f"{where}: {name}") for name in names}


def built(kind: Any, value: object, where: str) -> Any:
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        return None if value is None else built(inner[0], value, where)
    if get_origin(kind) is tuple:
        entries = listed(value, where)
        # tuple[int, ...] takes any number of values, tuple[int, str] exactly two.
        kinds = inner[:1] * len(entries) if inner[-1] is Ellipsis else inner
        if len(entries) != len(kinds):
            refuse(where, f"expected {len(kinds)} values, but there are {len(entries)}")
        return tuple(built(part, element, where) for part, element in zip(kinds, entries, strict=True))
    if get_origin(kind) is Mapping:
        return {name: built(inner[1], content, f"{where}: {name}") for name, content in mapping(value, where).items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return record(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value not in [member.value for member in kind]:
            refuse(where, f"{value!r:.80} is not a {kind.__name__}")
        return kind(value)
    return _SCALARS[kind](value, where)


_types = functools.cache(get_type_hints)
_SCALARS: Mapping[object, Callable[[object, str], object]] = {str: text, int: whole, bool: flag, torch.dtype: dtype}


def check_graphs(value: object, count: int, where: str) -> Mapping[str, Any]:
    """Check and return the data of one trace with `count` graphs.

    A node is [name, kind, target, args, kwargs, value] (`ir.graph_data`) and uses only earlier nodes.
    """
    data = fields(value, ("hints", "graphs"), where)
    # PyTorch specializes graphs for sizes 0 and 1.
    hints = wholes(data["hints"], f"{where}: hints", least=2)
    graphs = listed(data["graphs"], f"{where}: graphs")
    if len(graphs) != count:
        refuse(where, f"expected {count} graphs, but there are {len(graphs)}")
    # A size is a number, or text with symbols, evaluated for the hints.
    size = functools.cache(functools.partial(size_of, hints=hints))
    for number, nodes in enumerate(graphs):
        _Graph(f"{where}: graph {number}" if count > 1 else where, size).check(nodes)
    return data


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


class _Graph:
    def __init__(self, where: str, size: Callable[[str], int]) -> None:
        self._where = where
        self._size_of = size
        self._names: set[str] = set()
        self._started: set[str] = set()

    def _size(self, size: object) -> int:
        return self._size_of(size) if isinstance(size, str) else size_of(size, ())

    def check(self, nodes: object) -> None:
        entries = listed(nodes, self._where)
        if not 1 <= len(entries) <= MOST_NODES:
            refuse(self._where, f"it has {len(entries)} nodes: expected 1 to {MOST_NODES}")
        for number, entry in enumerate(entries):
            where = f"{self._where}: node {number}"
            if not isinstance(entry, list) or len(entry) != 6:
                refuse(where, "expected [name, kind, target, args, kwargs, value]")
            # Check everything before constructing a graph: FX executes generated code.
            if (entry[1] == "output") != (number == len(entries) - 1):
                refuse(where, "expected one output, as the last node")
            name = entry[0]
            if not _is_name(name):
                refuse(where, f"the name is {name!r:.80}: expected letters, digits and _")
            if name in self._names:
                refuse(where, f"an earlier node already has the name {name}")
            try:
                self._node(*entry)
            except ValueError as error:
                raise MalformedRecord(f"{where} ({name}): {error}") from None
            # Only later nodes may refer to this one: no cycles.
            self._names.add(name)

    def _node(self, name: str, kind: object, target: Any, args: Any, kwargs: Any, value: Any) -> None:
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise MalformedRecord("the arguments are not a list, or the keyword arguments are not a mapping")
        checks: Mapping[object, Callable[[Any, list[Any], Mapping[str, Any]], None]] = {
            "placeholder": self._placeholder,
            "get_attr": self._constant,
            "call_function": lambda target, args, kwargs: check_call(text(target, "its target"), args, kwargs),
            "call_method": self._call_method,
            "output": self._output,
        }
        if not isinstance(kind, str) or kind not in checks:
            raise MalformedRecord(f"the kind is {kind!r:.80}: expected one of {', '.join(map(str, checks))}")
        for argument in (*args, *kwargs.values()):
            self._argument(argument)
        checks[kind](target, args, kwargs)
        if kind == "call_method" and str(target).startswith("start_"):
            self._started.add(name)
        self._value(value)

    def _placeholder(self, target: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        if not _is_name(target):
            raise MalformedRecord(f"a placeholder's target is {target!r:.80}: expected letters, digits and _")
        if args or kwargs:
            raise MalformedRecord("a placeholder has arguments")

    def _constant(self, target: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        if not isinstance(target, list) or len(target) != 4 or args or kwargs:
            raise MalformedRecord("expected a constant as [name, dtype, shape, elements in base64]")
        name, kind, shape, content = target
        parts = name.split(".") if isinstance(name, str) else [""]
        # The constant becomes an attribute of the graph, and must not hide a method.
        if not all(map(_IDENTIFIER.fullmatch, parts)) or hasattr(fx.GraphModule, parts[0]):
            raise MalformedRecord(f"a constant has the invalid name {name!r:.80}")
        size = math.prod(wholes(shape, "its shape")) * dtype(kind, "its dtype").itemsize
        if size > LARGEST_CONSTANT:
            raise MalformedRecord(f"a constant has {size} bytes: a compiled folder allows at most {LARGEST_CONSTANT}")
        try:
            elements = base64.b64decode(text(content, "its elements"), validate=True)
        except binascii.Error as error:
            raise MalformedRecord(f"the elements are not base64: {error}") from None
        if len(elements) != size:
            raise MalformedRecord(f"a constant has {len(elements)} bytes of elements, but the shape needs {size}")

    def _call_method(self, target: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        takes = {**ON_COLLECTIVES, **ON_SUMS, **ON_STARTED}.get(target) if isinstance(target, str) else None
        if takes is None:
            raise MalformedRecord(f"the method {target!r:.80} is not allowed")
        if len(args) != takes or set(kwargs) != ({"beta"} if target == "addmm_" else set()):
            raise MalformedRecord(f"the method {target} has invalid arguments")
        # on: node whose method is called, either the placeholder `COLLECTIVES` or the result of a
        # start method.
        on = args[0].get("node") if isinstance(args[0], dict) else None
        if on is None or (on == COLLECTIVES, on in self._started) != (target in ON_COLLECTIVES, target in ON_STARTED):
            raise MalformedRecord(f"{on or args[0]!r:.80} does not have the method {target}")

    def _output(self, target: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        if target != "output" or kwargs or len(args) != 1 or not isinstance(args[0], dict) or set(args[0]) != {"tuple"}:
            raise MalformedRecord("an output must have one tuple as its argument")
        if not all(output is None or (isinstance(output, dict) and "node" in output) for output in args[0]["tuple"]):
            raise MalformedRecord("an output returns a value that is not a node")

    def _argument(self, value: Any) -> None:
        if isinstance(value, list):
            for element in value:
                self._argument(element)
        elif isinstance(value, dict):
            if len(value) != 1:
                raise MalformedRecord(f"the argument {value!r:.80} is invalid")
            # JSON has no nodes, tuples or dtypes; {"node": "x"} and {"tuple": [...]} stand for
            # them.
            ((kind, content),) = value.items()
            self._tagged(kind, content)
        elif isinstance(value, int | float) and abs(value) > _MOST[type(value)]:
            raise MalformedRecord(f"the number {value!r:.80} is out of range")

    def _tagged(self, kind: str, content: Any) -> None:
        match kind:
            case "node":
                right = isinstance(content, str) and content in self._names
            case "tuple" | "slice":
                self._argument(listed(content, f"a {kind}"))
                right = kind == "tuple" or len(content) == 3
            case "complex":
                self._argument(listed(content, "a complex number"))
                right = len(content) == 2 and all(isinstance(part, (int, float, dict)) for part in content)
            case "torch":
                right = isinstance(content, str) and (content in _DTYPES or content in _FORMATS)
            case "device":
                right = isinstance(content, str) and bool(_DEVICE.fullmatch(content))
            case "float":
                right = content in ("inf", "-inf", "nan")
            case _:
                right = False
        if not right:
            earlier = ": it is not an earlier node" if kind == "node" else ""
            raise MalformedRecord(f"the argument {{{kind!r:.40}: {content!r:.80}}} is invalid{earlier}")

    def _value(self, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, list):
            self._size(value)
        elif value and value[0] == "list":
            for element in value[1:]:
                self._value(element)
        elif len(value) == 6 and value[0] == "tensor":
            _, kind, device, shape, strides, storage = value
            dtype(kind, "its value")
            if not isinstance(device, str) or not _DEVICE.fullmatch(device):
                raise MalformedRecord(f"the value is on the invalid device {device!r:.80}")
            sizes = [self._size(size) for size in listed(shape, "the shape of its value")]
            steps = [self._size(step) for step in listed(strides, "the strides of its value")]
            if len(sizes) != len(steps) or min([*sizes, *steps], default=0) < 0:
                raise MalformedRecord(f"the value has the invalid shape {shape!r:.80} or strides {strides!r:.80}")
            # Because of strides, a storage may be larger than its elements.
            if math.prod(sizes) > LARGEST_SIZE or sum(map(int.__mul__, sizes, steps)) > LARGEST_SIZE:
                raise MalformedRecord("the value is larger than any memory")
            whole(storage, "the storage of its value")
        else:
            raise MalformedRecord(f"the value {value!r:.80} is invalid")

"""Conversion of a graph's values (fake tensors and symbolic sizes) to plain data and back.

A size is a number or an expression over symbols, such as "2*s0".
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hydragraph.private.tracing import hint_of, new_symbol

# PyTorch's undocumented functions of sizes
SYMBOLIC = (torch._sym_sqrt,)

# A number or expression; ["tensor", dtype, device, shape, strides, storage]; ["list", *values]; or None.
Data = Any


def storage_of(value: Tensor) -> int:
    number: int = value.untyped_storage()._cdata
    return number


@dataclass
class ValueEncoder:
    """Encoder of one trace's values; symbols and storages are numbered in order of appearance."""

    hints: list[int] = field(default_factory=list)
    _symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    # Texts of expressions, which are slow to print.
    _texts: dict[sympy.Expr, str] = field(default_factory=dict)
    _storages: dict[int, int] = field(default_factory=dict)

    def value(self, value: object, storages: Iterable[int] = ()) -> Data:
        """Return a node's value as data; None for unneeded values, such as symbolic floats.

        Args:
            storages: identifiers of the tensors' storages, in order, to use instead of the actual ones.

        Raises:
            ValueError: a size depends on a tensor's values.
        """
        storage_ids = iter(storages)
        if isinstance(value, Tensor):
            number = next(storage_ids, None)
            # Tensors with one storage get one number, which shows aliases.
            storage = self._storages.setdefault(storage_of(value) if number is None else number, len(self._storages))
            shape, strides = ([self._size(s) for s in sizes] for sizes in (value.shape, value.stride()))
            return ["tensor", str(value.dtype).removeprefix("torch."), str(value.device), shape, strides, storage]
        if isinstance(value, tuple | list):
            return ["list", *(self.value(part, storage_ids) for part in value)]
        return self._size(value) if isinstance(value, int | torch.SymInt) and not isinstance(value, bool) else None

    def _size(self, size: int | torch.SymInt) -> int | str:
        if not isinstance(size, torch.SymInt) or size.node.is_constant():
            return int(size)
        expression = size.node.expr
        if expression in self._texts:
            return self._texts[expression]
        for symbol in sorted(expression.free_symbols - self._symbols.keys(), key=str):
            # A symbol without a hint comes from a tensor's values: it has no size at capture.
            symint = size.node.shape_env.create_symintnode(symbol, hint=None)
            if symint.node.hint is None:
                raise ValueError("a graph has a size that depends on a tensor's values, such as the size of x[mask]")
            self._symbols[symbol] = sympy.Symbol(f"s{len(self.hints)}", integer=True, positive=True)
            self.hints.append(hint_of(symint))
        text = self._texts[expression] = str(expression.xreplace(self._symbols))
        return text


class ValueDecoder:
    def __init__(self, hints: Sequence[int]) -> None:
        self._hints = hints
        self._known: dict[str, Any] = {}
        self._tensors: dict[str, FakeTensor] = {}
        self._mode: FakeTensorMode | None = None

    def value(self, data: Data) -> Any:
        """Return the decoded value; equal tensors are one object, whose storage has no meaning."""
        if not isinstance(data, list):
            return self._size(data)
        if data[0] == "list":
            return tuple(map(self.value, data[1:]))
        _, dtype, device, shape, strides, _ = data
        # PyTorch takes half a millisecond to create a tensor with symbolic sizes
        form = str((dtype, device, shape, strides))
        if form not in self._tensors:
            sizes = [[self._size(s) for s in dims] for dims in (shape, strides)]
            tensor = torch.empty_strided(*sizes, dtype=getattr(torch, dtype), device="meta")
            # A `FakeTensor` pairs a meta tensor with the device that it pretends to be on.
            self._tensors[form] = FakeTensor(self._trace(), tensor, torch.device(device))
        return self._tensors[form]

    def forms(self, data: Data) -> list[TensorForm]:
        if not isinstance(data, list):
            return []
        if data[0] == "list":
            return [form for part in data[1:] for form in self.forms(part)]
        return [TensorForm(getattr(torch, data[1]), tuple(map(self._size, data[3])))]

    def _trace(self) -> FakeTensorMode:
        if self._mode is None:
            self._mode = FakeTensorMode(shape_env=ShapeEnv())
            for i, hint in enumerate(self._hints):
                self._known[f"s{i}"] = new_symbol(self._mode, i, hint)
        return self._mode

    def _size(self, size: int | str | None) -> Any:
        if not isinstance(size, str):
            return size
        self._trace()
        if size not in self._known:
            self._known[size] = _evaluated(ast.parse(size, mode="eval").body, self._known)
        return self._known[size]


LARGEST_SIZE = 1 << 48
_LONGEST = 500


def size_of(size: object, hints: Sequence[int]) -> int:
    """Return the value of an untrusted size in the trace; raise ValueError if the size is invalid."""
    if isinstance(size, str):
        numbers = {f"s{i}": hint for i, hint in enumerate(hints)}
        try:
            if len(size) > _LONGEST:
                raise ValueError("too long")
            size = int(_evaluated(ast.parse(size, mode="eval").body, numbers))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            symbol_names = ", ".join(numbers) or "numbers"
            raise ValueError(f"the size {size[:80]!r} is not an expression of {symbol_names}") from error
    if isinstance(size, bool) or not isinstance(size, int) or abs(size) > LARGEST_SIZE:
        raise ValueError(f"{size!r} is not a valid size")
    return size


class TensorForm(NamedTuple):
    dtype: torch.dtype
    sizes: tuple[Any, ...]

    @property
    def integral(self) -> bool:
        return not (self.dtype.is_floating_point or self.dtype.is_complex)


def form_in(data: Data) -> TensorForm | None:
    if not isinstance(data, list) or data[0] != "tensor":
        return None
    return TensorForm(getattr(torch, data[1]), tuple(data[3]))


def storages(data: Data) -> list[int]:
    if not isinstance(data, list):
        return []
    return [data[5]] if data[0] == "tensor" else [n for part in data[1:] for n in storages(part)]


def _power(base: Any, exponent: Any) -> Any:
    """Return a power; reject large exponents, to bound the time of evaluating untrusted text."""
    if not isinstance(exponent, int) or not 0 <= exponent <= 4 or (isinstance(base, int) and base > LARGEST_SIZE):
        raise ValueError(f"a stored graph has the unsupported size ({base})**{exponent}: capture the model again")
    return base**exponent


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def _evaluated(node: ast.AST, symbols: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(left, symbols), _evaluated(right, symbols))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand, symbols)
        case ast.Call(func=ast.Name(id=name), args=[first, second]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_evaluated(first, symbols), _evaluated(second, symbols))
    raise ValueError(f"a stored graph has the unsupported size {ast.unparse(node)!r}: capture the model again")

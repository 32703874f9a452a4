"""Internals of Inductor, imported only when needed because the import takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv

from hydragraph.kernels.triton_jit import why_not
from hydragraph.private.tracing import hint_of, new_symbol

# Smallest value of a symbol: Inductor specializes 0 and 1
LEAST = 2

# Empties the list that it receives
Code = Callable[[list[Any]], Sequence[Any]]
Condition = Callable[[Sequence[int]], bool]  # takes sizes


def missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 7
        return why_not(device) or (None if major >= 7 else "Triton does not support GPUs this old")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (g++, or the compiler in the environment variable CXX)"
    return None


def fake_like(value: Tensor, device: torch.device, strides: Sequence[int] | None = None) -> Tensor:
    assert isinstance(value, FakeTensor)
    with value.fake_mode:
        if strides is None:
            return torch.empty(value.shape, dtype=value.dtype, device=device)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)


def mode_of(values: Iterable[object]) -> FakeTensorMode:
    return next(v.fake_mode for v in values if isinstance(v, FakeTensor))


def run_fake(node: fx.Node, values: Mapping[fx.Node, Any], mode: FakeTensorMode) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def symbols_of(values: Iterable[object]) -> list[sympy.Symbol]:
    symbols = {s for value in values for size in _sizes(value) for s in size.node.expr.free_symbols}
    return sorted(symbols, key=str)


def sources(values: Sequence[object]) -> dict[sympy.Symbol, tuple[int, int | None, int]]:
    """For each symbol, return a value that determines it: (index of the value, dimension, factor).

    The symbol is the dimension's size divided by the factor. The dimension is None for a SymInt.
    """
    places: dict[sympy.Symbol, tuple[int, int | None, int]] = {}
    for index, value in enumerate(values):
        dims = [(None, value)] if isinstance(value, torch.SymInt) else list(enumerate(getattr(value, "shape", ())))
        for dim, size in dims:
            # size 2*s0 in dimension 1 of value 3: s0 -> (3, 1, 2); small factors are preferred
            factor, symbol = size.node.expr.as_coeff_Mul() if isinstance(size, torch.SymInt) else (0, None)
            if isinstance(symbol, sympy.Symbol) and (symbol not in places or factor < places[symbol][2]):
                places[symbol] = (index, dim, int(factor))
    return places


def _sizes(value: object) -> list[torch.SymInt]:
    tensor = isinstance(value, Tensor)
    return [s for s in ([*value.shape, *value.stride()] if tensor else [value]) if isinstance(s, torch.SymInt)]


@dataclass(frozen=True)
class _Trace:
    """New trace without assumptions on sizes, with one symbol for each symbol of an earlier trace."""

    mode: FakeTensorMode
    symbols: Mapping[sympy.Symbol, torch.SymInt]

    @classmethod
    def of(cls, hints: Mapping[sympy.Symbol, int]) -> _Trace:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        return cls(mode, {symbol: new_symbol(mode, i, size) for i, (symbol, size) in enumerate(hints.items())})

    def size(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr.xreplace({old: new.node.expr for old, new in self.symbols.items()})
        value = expression.xreplace({new.node.expr: sympy.Integer(hint_of(new)) for new in self.symbols.values()})
        return self.mode.shape_env.create_symintnode(expression, hint=int(value))

    def fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return self.size(value)
        shape, strides = ([self.size(s) for s in sizes] for sizes in (value.shape, value.stride()))
        with self.mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], outputs: Sequence[Any], hints: Mapping[sympy.Symbol, int]
) -> tuple[Code, Condition] | None:
    """Compile a functional graph with symbolic sizes; return None if outputs' strides would change.

    Args:
        inputs, outputs: fake values, from any trace.
        hints: size of each symbol, for tuning. The code's first arguments are the symbols in this order.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    trace = _Trace.of(hints)
    sizes = list(trace.symbols.values())
    fakes = [trace.fake(value) for value in inputs]
    traced = _decompose(graph, sizes, fakes, trace.mode)
    for result, output in zip(traced.graph.output_node().args[0], outputs, strict=True):
        # Users of these outputs rely on their strides in the captured graph.
        if isinstance(output, Tensor) and str(result.meta["val"].stride()) != str(trace.fake(output).stride()):
            return None
    # Ranks compile simultaneously, so each uses one thread.
    alone = {"compile_threads": 1} if all(v.device.type == "cpu" for v in fakes if isinstance(v, Tensor)) else {}
    with tracing(TracingContext(trace.mode)), config.patch(alone):
        code = compile_fx_inner(traced, [*sizes, *fakes], cudagraphs=BoxedBool(False), is_inference=True)
    return code, _condition(trace.mode.shape_env.produce_guards_expression(sizes))


def _decompose(graph: fx.GraphModule, sizes: list, inputs: list, mode: FakeTensorMode) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    with mode, torch.no_grad():
        trace = make_fx(lambda sizes, inputs: tuple(graph(*inputs)), decomposition_table=select_decomp_table())
        traced = trace(sizes, inputs)
    traced.graph.set_codegen(fx.graph.CodeGen())
    output = traced.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    traced.recompile()
    return traced


def _condition(guards: str | None) -> Condition:
    # guards: expression over L['t0'], L['t1'], ...: the sizes, in the order of `hints`
    code = compile(guards or "True", "<what Inductor assumed>", "eval")
    return lambda sizes: bool(eval(code, SYMPY_INTERP, {"L": {f"t{i}": size for i, size in enumerate(sizes)}}))

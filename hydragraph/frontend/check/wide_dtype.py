"""Execution of models and graphs in one wide dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS = (Tensor.half, Tensor.bfloat16, Tensor.float)
_SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def _replaced(value: Any, wide: torch.dtype) -> Any:
    narrower = isinstance(value, torch.dtype) and value in _ORDER[: _ORDER.index(wide)]
    return wide if narrower else value


def _all_replaced(args: Any, kwargs: Any, wide: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_replaced(v, wide) for v in args), {n: _replaced(v, wide) for n, v in (kwargs or {}).items()}


def widened(value: Tensor, wide: torch.dtype) -> Tensor:
    return value.detach().to("cpu", wide if value.is_floating_point() else value.dtype, copy=True)


class _Wide(TorchFunctionMode):
    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].to(self._wide)
        args, kwargs = _all_replaced(args, kwargs, self._wide)
        return func(*args, **kwargs)


@contextmanager
def computing(wide: torch.dtype | None) -> Iterator[None]:
    """Use `wide` for new tensors and instead of narrower dtypes in casts; None has no effect."""
    with default_dtype(wide), nullcontext() if wide is None else _Wide(wide):
        yield


@contextmanager
def default_dtype(wide: torch.dtype | None) -> Iterator[None]:
    """Set the default dtype of all threads; None has no effect."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Widened(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, wide: torch.dtype) -> None:
        super().__init__(graph)
        self._wide = wide

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _SOFTMAX:
            # Ignore half_to_float: the operand is already wide
            args = (*args[:2], False)
        return super().call_function(target, *_all_replaced(args, kwargs, self._wide))


def runner(graph: fx.GraphModule, wide: torch.dtype | None) -> Callable[..., Any]:
    """Return a function that runs a graph in the dtype `wide`; call it within `default_dtype`."""
    if wide is None:
        return graph

    def run(*given: Any) -> Any:
        with _Wide(wide):
            return _Widened(graph, wide).run(*given)

    return run

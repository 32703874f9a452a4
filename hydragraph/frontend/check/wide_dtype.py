"""Compute in one wide dtype what was written for narrower ones, on both sides alike: then only mathematics differs.

A graph that was captured for bfloat16, and a model that casts to float32 inside, both round. Where two computations
that should be equal round differently, no bound tells a wrong one from a right one; so casts to narrower dtypes become
casts to the wide one.
"""

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


def narrower(wide: torch.dtype) -> frozenset[torch.dtype]:
    """Return the floating dtypes that `wide` stands for."""
    return frozenset(_ORDER[: _ORDER.index(wide)])


def widened(value: Tensor, wide: torch.dtype) -> Tensor:
    """Return a copy of a tensor on the CPU, in the wide dtype if it is floating."""
    return value.detach().to("cpu", wide if value.is_floating_point() else value.dtype, copy=True)


class _Wide(TorchFunctionMode):
    """Makes every cast to a narrower dtype one to the wide dtype, as a model's own code runs."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide = wide
        self._narrow = narrower(wide)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].to(self._wide)
        wider = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._replaced, args), **wider)

    def _replaced(self, value: Any) -> Any:
        return self._wide if isinstance(value, torch.dtype) and value in self._narrow else value


@contextmanager
def computing(wide: torch.dtype | None) -> Iterator[None]:
    """Run a model's own code with casts widened, and new tensors in the wide dtype; None: as it is written."""
    with default_dtype(wide), nullcontext() if wide is None else _Wide(wide):
        yield


@contextmanager
def default_dtype(wide: torch.dtype | None) -> Iterator[None]:
    """Make new tensors in the wide dtype, in every thread of this process; None: as they are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Widened(fx.Interpreter):
    """Runs a captured graph with its casts widened."""

    def __init__(self, graph: fx.GraphModule, wide: torch.dtype) -> None:
        super().__init__(graph)
        self._wide = wide
        self._narrow = narrower(wide)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; `half_to_float` says that it widens by itself, which is done already."""
        if target in _SOFTMAX:
            args = (*args[:2], False)
        wider = {name: self._replaced(value) for name, value in kwargs.items()}
        return super().call_function(target, tuple(map(self._replaced, args)), wider)

    def _replaced(self, value: Any) -> Any:
        return self._wide if isinstance(value, torch.dtype) and value in self._narrow else value


def runner(graph: fx.GraphModule, wide: torch.dtype | None) -> Callable[..., Any]:
    """Return what runs a captured graph with its casts widened, within `default_dtype`; None: as it was captured."""
    if wide is None:
        return graph

    def run(*given: Any) -> Any:
        with _Wide(wide):
            return _Widened(graph, wide).run(*given)

    return run

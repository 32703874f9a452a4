"""What a model hangs on PyTorch that no trace records: hooks of modules and tensors, and backwards of its own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.modules.module as module_state
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.weight_norm import WeightNorm

_OF_MODULES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_OF_TENSORS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "post-accumulate hook"}
# What transformers hangs on a model that was run: it notes outputs for whoever asked, and computes nothing.
_HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils")


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a module alone, and what kind each is; not those that only note, or reparametrise."""
    for name, kind in _OF_MODULES.items():
        for hook in (getattr(module, name, None) or {}).values():
            if not isinstance(hook, WeightNorm) and getattr(hook, "__module__", "") not in _HARMLESS:
                yield kind, hook


def hooks_of_tensor(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a parameter or buffer, and what kind each is."""
    for name, kind in _OF_TENSORS.items():
        for hook in (getattr(tensor, name, None) or {}).values():
            yield kind, hook


def global_hooks() -> Iterator[tuple[str, Any]]:
    """Yield the hooks that are on every module of the process."""
    for name, kind in _OF_MODULES.items():
        for hook in getattr(module_state, f"_global{name}", {}).values():
            yield kind, hook


def is_wrapper(module: nn.Module) -> bool:
    """Say whether a module is another one, compiled or spread over processes, as PyTorch wraps it."""
    wrappers = ("torch._dynamo.", "torch.nn.parallel.", "torch.distributed.")
    return f"{type(module).__module__}.".startswith(wrappers)


@contextlib.contextmanager
def noticing(refuse: Callable[[str, str], Exception]) -> Iterator[None]:
    """Raise, while a model is traced, where it does what no trace records.

    Args:
        refuse: makes the error of what was refused and a remedy.
    """
    apply = inspect.getattr_static(Function, "apply")  # a classmethod, of Python or of C (since PyTorch 2.14)

    def own_backward(kind: type[Function], *arguments: Any, **keywords: Any) -> Any:
        values = [*arguments, *keywords.values()]
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in values)
        if torch.is_grad_enabled() and floats and kind.__module__ == "torch.utils.checkpoint":
            raise refuse("reentrant checkpointing", "pass use_reentrant=False, or let the strategy recompute")
        if torch.is_grad_enabled() and floats and not kind.__module__.startswith("torch."):
            raise refuse(
                f"torch.autograd.Function {kind.__qualname__}, whose backward is not traced",
                "write its forward with operators that have this gradient (x + (y - x).detach() has the value of y and "
                "the gradient of x), or register it with torch.library.custom_op and register_autograd",
            )
        return apply.__get__(None, kind)(*arguments, **keywords)

    def hook(*_: Any, **__: Any) -> Any:
        raise refuse("a gradient hook on a tensor, which is not traced", "remove it from forward")

    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        if region._enabled:
            raise refuse("a torch.autocast region", "cast by hand (x.to(dtype)), or pass dtype= alone")
        return enter(region)

    with (
        mock.patch.object(torch.autocast, "__enter__", entered),
        mock.patch.object(Function, "apply", classmethod(own_backward)),
        mock.patch.object(Tensor, "register_hook", hook),
        mock.patch.object(Tensor, "register_post_accumulate_grad_hook", hook),
    ):
        yield

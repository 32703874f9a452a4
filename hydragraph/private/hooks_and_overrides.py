"""Detection of features that tracing does not record: hooks and custom backward functions."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.modules.module as module_state
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import CheckpointFunction

_OF_MODULES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_OF_TENSORS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "post-accumulate hook"}
_READS = (
    *((Tensor, name) for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")),
    (torch.SymBool, "__bool__"),
    (torch.SymFloat, "__float__"),
    (torch.SymInt, "__int__"),
    (torch.SymInt, "__bool__"),
)
# Transformers' hooks that only record.
_HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils")


def _hooks(owner: Any, tables: dict[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in tables.items():
        for hook in (getattr(owner, prefix + name, None) or {}).values():
            yield kind, hook


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for kind, hook in _hooks(module, _OF_MODULES):
        if not isinstance(hook, WeightNorm) and getattr(hook, "__module__", "") not in _HARMLESS:
            yield kind, hook


def hooks_of_tensor(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    return _hooks(tensor, _OF_TENSORS)


def global_hooks() -> Iterator[tuple[str, Any]]:
    return _hooks(module_state, _OF_MODULES, "_global")


def is_wrapper(module: nn.Module) -> bool:
    wrappers = ("torch._dynamo.", "torch.nn.parallel.", "torch.distributed.")
    return f"{type(module).__module__}.".startswith(wrappers)


@contextlib.contextmanager
def noticing(refuse: Callable[[str, str], Exception]) -> Iterator[None]:
    """Raise `refuse(description, remedy)` if a model uses a feature that tracing does not record."""
    # Since PyTorch 2.14, this is a C function
    apply = inspect.getattr_static(Function, "apply")

    def own_backward(kind: type[Function], *arguments: Any, **keywords: Any) -> Any:
        values = [*arguments, *keywords.values()]
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in values)
        if torch.is_grad_enabled() and floats and kind is CheckpointFunction:
            raise refuse("reentrant checkpointing", "pass use_reentrant=False, or use a strategy that recomputes")
        if torch.is_grad_enabled() and floats and not kind.__module__.startswith("torch."):
            raise refuse(*own_backward_refused(kind.__qualname__))
        return apply.__get__(None, kind)(*arguments, **keywords)

    def hook(*_: Any, **__: Any) -> Any:
        raise refuse("a gradient hook on a tensor, which is not traced", "remove the hook from forward")

    # Reading a value fails in a trace. A model may catch the error and take another branch, so
    # remember reads by the user's code, and refuse them at the end.
    caught: list[str] = []

    def remembered(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            try:
                return original(*arguments, **keywords)
            except Exception:
                caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
                if caller not in ("torch", "transformers", "hydragraph"):
                    caught.append(name)
                raise

        return mock.patch.object(owner, name, guarded, create=True)

    def refused_if(owner: Any, name: str, changes: Callable[..., bool], what: str, remedy: str) -> Any:
        original = getattr(owner, name)

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            if changes(*arguments, **keywords):
                raise refuse(what, remedy)
            return original(*arguments, **keywords)

        return mock.patch.object(owner, name, guarded)

    def switches_on(*arguments: Any, **keywords: Any) -> bool:
        return any(value is True for value in [*arguments, *keywords.values()])

    grad_fn: Any = torch._C.TensorBase.grad_fn

    def node_of(tensor: Tensor) -> Any:
        # PyTorch's own code gets the real node; others could register hooks on it.
        node = grad_fn.__get__(tensor)
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return node if node is None or asking.partition(".")[0] == "torch" else _HookedNode(node, hook)

    enter, cast = "__enter__", "cast explicitly (x.to(dtype)), or only pass dtype="
    saved, unhook = "hooks on saved tensors, which are not traced", "remove saved_tensors_hooks from forward"
    inference = "a torch.inference_mode() region"
    with (
        refused_if(torch.autocast, enter, lambda region: region._enabled, "a torch.autocast region", cast),
        refused_if(torch, "set_autocast_enabled", switches_on, "torch.set_autocast_enabled", cast),
        # PyTorch's subclasses of saved_tensors_hooks return values unchanged.
        refused_if(saved_tensors_hooks, enter, lambda region: type(region) is saved_tensors_hooks, saved, unhook),
        refused_if(torch.inference_mode, enter, lambda region: region.mode, inference, "use torch.no_grad()"),
        mock.patch.object(Tensor, "grad_fn", property(node_of), create=True),
        mock.patch.object(Function, "apply", classmethod(own_backward)),
        mock.patch.object(Tensor, "register_hook", hook),
        mock.patch.object(Tensor, "register_post_accumulate_grad_hook", hook),
        contextlib.ExitStack() as reads,
    ):
        for owner, name in _READS:
            reads.enter_context(remembered(owner, name))
        yield
    if caught:
        what = f"a tensor's value is read ({caught[0]}), which fails in a trace, and the error is caught"
        raise refuse(what, "remove Python decisions on tensor values (.item(), if) from forward and loss")


def own_backward_refused(name: str) -> tuple[str, str]:
    remedy = "use operators with this gradient in forward (x + (y - x).detach() has y's value and x's gradient)"
    return f"torch.autograd.Function {name}, whose backward is not traced", remedy


def own_backward_of(result: Tensor) -> str | None:
    """Return the name of a custom torch.autograd.Function in a result's autograd graph, or None."""
    pending = [result.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only nodes of Python's autograd functions have this attribute, the function.
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and not _is_of_torch(kind):
            return str(kind.__qualname__)
        pending += [before for before, _ in node.next_functions]
    return None


def _is_of_torch(kind: type) -> bool:
    place = kind.__module__
    importable = getattr(sys.modules.get(place), kind.__name__, None) is kind
    return place.startswith("torch.") and (importable or place.startswith("torch._library"))


class _HookedNode:
    def __init__(self, node: Any, hook: Callable[..., Any]) -> None:
        self._node = node
        self.register_hook = hook
        self.register_prehook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def own_functions_of(tensor: Tensor) -> str | None:
    """Return the name of a tensor's class if it overrides operators, else None."""
    plain = (torch._C._disabled_torch_function_impl, getattr(Tensor.__torch_function__, "__func__", None))
    kind = type(tensor)
    function = inspect.getattr_static(kind, "__torch_function__")
    is_plain = getattr(function, "__func__", function) in plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return None if is_plain else kind.__qualname__


def shares_elements_with_itself(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the addresses of a tensor's first byte and after its last byte; None without memory."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    # [2, 3] with strides (3, 1): reach = 1 * 3 + 2 * 1 + 1 = 6 elements
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.data_ptr()
    return first, first + reach * tensor.element_size()


def number_of_hooks(module: nn.Module) -> int:
    own = module.__dict__
    return sum(len(own[name]) for name in _OF_MODULES)


def number_of_tensor_hooks(tensor: Any) -> int:
    gradient, accumulated = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (len(gradient) if gradient else 0) + (len(accumulated) if accumulated else 0)


def version_of(tensor: Tensor) -> int:
    """Return a tensor's count of in-place changes, except changes through `tensor.data`; -1 in inference mode."""
    return -1 if tensor.is_inference() else tensor._version

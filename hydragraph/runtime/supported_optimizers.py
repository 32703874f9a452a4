"""Supported optimizers: elementwise ones, so that every rank can update its own flat shard."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from hydragraph.errors import Unsupported
from hydragraph.kernels.adamw import AdamW
from hydragraph.private.optimizers import step_hooks, tensor_hooks

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# Attributes that subclasses may define.
_HARMLESS = frozenset({"step", "__init__", "__repr__", "__slots__"})


def call_factory(factory: OptimizerFactory, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer that a user's function creates for flat tensors.

    Raises:
        Unsupported: the optimizer rejects flat tensors (Muon, LBFGS).
    """
    try:
        made = factory(named)
    except Exception as error:
        kind = _constructed(error)
        if kind is None or issubclass(kind, ELEMENTWISE):
            raise
        raise _not_elementwise(kind) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise Unsupported(
            f"the function returned {made!r:.80}",
            where="optimizer",
            remedy="return an optimizer, such as torch.optim.AdamW(parameters)",
        )
    return made


def state_bytes(factory: OptimizerFactory, names: Sequence[str], dtype: torch.dtype) -> int:
    """Return the bytes per element of fp32 weight, optimizer state and `hydragraph.AdamW`'s 16-bit copy."""
    # After a step with two elements per parameter, states of two elements are per element; step
    # counts are not.
    named = [(name, nn.Parameter(torch.ones(2))) for name in names]
    for _, parameter in named:
        parameter.grad = torch.ones(2)
    optimizer = call_factory(factory, named)
    optimizer.step()
    states = [optimizer.state[parameter].values() for group in optimizer.param_groups for parameter in group["params"]]
    kept = max(sum(v.element_size() for v in s if isinstance(v, torch.Tensor) and v.numel() == 2) for s in states)
    rounded = dtype.itemsize if isinstance(optimizer, AdamW) and dtype.itemsize == 2 else 0
    return torch.float32.itemsize + kept + rounded


def _constructed(error: Exception) -> type[torch.optim.Optimizer] | None:
    # If an optimizer's __init__ failed, a frame of the traceback has it.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        built = frame.f_locals.get("self")
        if isinstance(built, torch.optim.Optimizer):
            return type(built)
    return None


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise Unsupported unless an optimizer updates all elements alike, without hooks."""
    kind = type(optimizer)
    if not isinstance(optimizer, ELEMENTWISE):
        raise _not_elementwise(kind)
    changed = next(_overridden(kind), None)
    if changed is None and _inside(optimizer.step) not in _STEPS:
        changed = "step"
    if changed is not None:
        base = next(c for c in kind.__mro__ if c in (*ELEMENTWISE, AdamW))
        raise Unsupported(
            f"it defines its own {changed!r}, but each rank has only flat shards, so an update must treat every "
            "element in the same way",
            where=f"optimizer {kind.__name__}",
            remedy=f"use {base.__module__.partition('.')[0]}.{'optim.' if base is not AdamW else ''}{base.__name__} "
            "itself, and move your change into the loss or a learning-rate schedule",
        )
    tensors: Iterator[Any] = (p for group in optimizer.param_groups for p in group["params"])
    hooks = step_hooks(optimizer) or next(filter(None, map(tensor_hooks, tensors)), "")
    if hooks:
        raise Unsupported(
            f"it has {hooks}, which would see this rank's flat shards instead of whole tensors",
            where=f"optimizer {type(optimizer).__name__}",
            remedy="remove the hook; clip gradients with max_grad_norm, and change learning rates between steps",
        )


def check_settings(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for name, default in optimizer.defaults.items():
            values = group.get(name) if isinstance(default, tuple) else (group.get(name),)
            numeric = default if isinstance(default, tuple) else (default,)
            if all(type(number) in (int, float) for number in numeric) and not _are_numbers(values):
                raise Unsupported(
                    f"a parameter group has {name}={group.get(name)!r}",
                    where=f"optimizer {type(optimizer).__name__}",
                    remedy="use numbers",
                )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(
        isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1) for value in values
    )


def _overridden(kind: type) -> Iterator[str]:
    bases = (*ELEMENTWISE, AdamW)
    for derived in kind.__mro__[: next(i for i, c in enumerate(kind.__mro__) if c in bases)]:
        for name, value in vars(derived).items():
            own = callable(value) or isinstance(value, (classmethod, staticmethod, property))
            if (own and name not in _HARMLESS and hasattr(torch.optim.Optimizer, name)) or name == "_init_group":
                yield name


def _not_elementwise(kind: type) -> Unsupported:
    names = ", ".join(c.__name__ for c in ELEMENTWISE)
    return Unsupported(
        "it does not treat every element in the same way, but each rank has only flat shards",
        where=f"optimizer {kind.__name__}",
        remedy=f"use one of torch.optim's {names}",
    )


def _inside(step: Any) -> Any:
    """Return the function inside PyTorch's own wrappers."""
    function = getattr(step, "__func__", step)
    while hasattr(function, "__wrapped__") and _is_torch(function):
        function = function.__wrapped__
    return function


def _is_torch(function: Any) -> bool:
    # `__module__` is unreliable: functools.wraps copies it.
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("torch.")


_STEPS = frozenset(_inside(kind.step) for kind in (*ELEMENTWISE, AdamW))

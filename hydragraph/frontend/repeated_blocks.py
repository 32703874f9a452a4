"""Copying of a model without its weights, and search for its repeated blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.rebound_functions import rebind


def meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model to the meta device with floating-point parameters in `dtype`, without copying weights.

    Tied parameters stay tied; buffers keep their dtype (rotary frequencies stay fp32 under bf16).
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, device="meta", dtype=kind)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    memo |= {key: value.to("meta") for key, value in computed(model).items()}
    copied = copy.deepcopy(model, memo)
    rebind(copied, memo)
    return copied


def computed(model: nn.Module) -> dict[int, Any]:
    """Return tensor attributes that were computed from parameters, as a memo for `copy.deepcopy`.

    The old weight norm stores its product in such an attribute, and recomputes it in every forward.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    return {id(v): v.detach() for v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


def block_list(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the path and the module list of a model's repeated blocks: the list with the most parameters.

    Raises:
        Unsupported: there is none, or it contains a block twice.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if path is None:
        sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in lists.items() if not _inside(n, lists)}
        path = max(sizes, key=lambda n: sizes[n], default=None)
    if path is None or path not in lists or not any(True for _ in lists[path].parameters()):
        raise Unsupported(
            "no repeated blocks were found" if path is None else f"`{path}` is no nn.ModuleList with parameters",
            where=type(model).__name__,
            remedy="name the nn.ModuleList of the repeated blocks with blocks='path.to.list'",
        )
    chosen = lists[path]
    if len({id(m) for m in chosen}) < len(chosen):
        raise Unsupported(
            "the same block occurs twice (shared blocks)",
            where=path,
            remedy="give every layer its own module (copy.deepcopy)",
        )
    return path, chosen


def _inside(name: str, lists: Iterable[str]) -> bool:
    return any(name.startswith(other + ".") for other in lists)

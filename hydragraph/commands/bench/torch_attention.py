"""PyTorch's `varlen_attn`, whose arguments differ between versions."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any

from torch import Tensor

from hydragraph.errors import Unsupported


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """Compute causal attention within sequences; return [T, Hq, D].

    Args:
        q: [T, Hq, D].
        k, v: [T, Hk, D].
        starts: [N + 1] int32, the boundaries of N sequences.

    Raises:
        Unsupported: the tensors are not on CUDA.
    """
    if q.device.type != "cuda":
        raise Unsupported("tensors on the CPU", where="varlen_attn", remedy="use a CUDA device")
    function, parameters = _function()
    q, k, v, options = arguments(q, k, v, scale, parameters)
    out: Tensor = function(q, k, v, starts, starts, longest, longest, **options)
    return out


def arguments(
    q: Tensor, k: Tensor, v: Tensor, scale: float, accepted: Collection[str]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return queries, keys, values and options for a function that accepts the arguments `accepted`.

    If the function does not accept grouped heads, repeat key/value heads; without a scale argument, scale queries.
    """
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if "enable_gqa" in accepted:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    elif q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if "scale" in accepted:
        options["scale"] = scale
    else:  # the function scales by 1 / sqrt(D)
        q = q * (scale * q.shape[-1] ** 0.5)
    return q, k, v, options


@cache
def _function() -> tuple[Any, frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)

"""Gated delta rule of flash-linear-attention, in 16 bits with fp32 sums."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_LARGEST_KEY = 256  # features
_OLDEST = "0.6"


def usable(k: Tensor) -> bool:
    fits = k.dtype in (torch.bfloat16, torch.float16) and k.shape[-1] <= _LARGEST_KEY
    return k.is_cuda and fits and _function() is not None


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return _apply([x.unsqueeze(0) for x in (q, k, v, g, beta)], cu_seqlens).squeeze(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    leaves = [x.unsqueeze(0).detach().requires_grad_() for x in (q, k, v, g, beta)]
    with torch.enable_grad():
        out = _apply(leaves, cu_seqlens)
    dq, dk, dv, dg, dbeta = (x.squeeze(0) for x in torch.autograd.grad(out, leaves, grad.unsqueeze(0)))
    return dq, dk, dv, dg, dbeta


def _apply(leaves: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    q, k, v, g, beta = leaves
    function = _function()
    assert function is not None
    out: Tensor = function(q, k, v, g, beta, cu_seqlens=cu_seqlens.long(), use_qk_l2norm_in_kernel=True)[0]
    return out


@cache
def _function() -> Any:
    try:
        version = import_module("fla").__version__
        function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError):
        return None
    return function if TorchVersion(version) >= _OLDEST else None

"""Traceable backward for transformers' grouped matrix product; transformers up to 5.20 has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("hydragraph::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(rows: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rows` and `weight`.

    Args:
        rows: [tokens, inputs], grouped by expert.
        weight: [experts, inputs, outputs].
        ends: [experts], index after each expert's last row.
        gradient: [tokens, outputs].
    """
    of_rows = torch.zeros_like(rows)
    of_weight = torch.zeros_like(weight)
    # rows [start, end) belong to the expert; without rows, its gradients stay 0
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(gradient[start:end], weight[expert].T, out=of_rows[start:end])
        torch.mm(rows[start:end].T, gradient[start:end], out=of_weight[expert])
        start = end
    return of_rows, of_weight


@grouped_mm_backward.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    return *torch.ops.hydragraph.grouped_mm_backward(rows, weight, ends, gradient), None


def make_traceable() -> None:
    ops = torch.ops.transformers
    if hasattr(ops, "grouped_mm_fallback") and not hasattr(ops, "grouped_mm_fallback_backward"):
        torch.library.register_autograd("transformers::grouped_mm_fallback", _backward, setup_context=_keep)

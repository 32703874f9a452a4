"""Tensors shaped like operands, and the dtype of sums."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64 summands."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def contiguous_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)

"""Memory for large tensors that are written once and then dropped: most of what a check of wide blocks would cost.

A page costs the kernel more to hand out than what stands on it costs to compute. Huge pages make it a fifth of that.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

# From so many bytes on it pays.
_LARGE = 1 << 24


def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU, contiguous, that takes no memory before it is written."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

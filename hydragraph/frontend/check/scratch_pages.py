"""Memory for large tensors that are written once and then dropped: most of what a check of wide blocks would cost.

A page costs the kernel more to hand out than what stands on it costs to compute. Huge pages make it a fifth of that;
and what one gradient leaves is there for the next, where the allocator does not give it back in between.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# From so many bytes on it pays.
_LARGE = 1 << 24
# Settings of glibc's malloc (man mallopt), and what they are once it has met large blocks: its own adaptation ends
# with the first call of mallopt, and would end there.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_ADAPTED = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20))
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))


def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU, contiguous, that takes no memory before it is written."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@contextmanager
def reused() -> Iterator[None]:
    """Keep memory that is freed for what is allocated next, and give all back in the end; glibc only."""
    libc = _glibc()
    for option, value in _KEEPING if libc else ():
        libc.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in _ADAPTED if libc else ():
            libc.mallopt(option, value)
        if libc:
            libc.malloc_trim(0)


def _glibc() -> Any:
    """Return glibc's functions; None where another library allocates."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None

"""Memory for large CPU tensors."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LARGE = 1 << 24
# Options of glibc's malloc (man mallopt), with values after and within `reused`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_ADAPTED = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20))
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))


def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros, which uses no memory until it is written."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@contextmanager
def reused() -> Iterator[None]:
    """Make glibc keep freed memory for reuse until the context exits."""
    libc = _glibc()
    # Without mmap and trimming, freed memory stays in the heap, with mapped pages.
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
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None

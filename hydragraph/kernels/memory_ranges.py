"""Thousands of ranges moved on a CPU by one call: a loop of memcpy, which numba compiles once per installation.

Python takes half a microsecond to move a range, which for ranges of a kilobyte is nearly all of the time. numba takes a
quarter of a second to import, so that this module is imported where there are thousands of them to move.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numba import types
from numpy.typing import NDArray

from hydragraph.kernels.numba_compiler import compiled

if TYPE_CHECKING:
    from torch import Tensor

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


def copy_ranges(source: Tensor, target: Tensor, offsets: tuple[NDArray[np.int64], ...]) -> None:
    """Copy ranges of one buffer on a CPU to ranges of another of the same element's size, which it does not overlap.

    Args:
        source, target: 1-D and contiguous; nothing is checked.
        offsets: where each range begins in the source and in the target, and its length; [R] each, in elements.
    """
    _copy(source.data_ptr(), target.data_ptr(), source.dtype.itemsize, *offsets)


@partial(compiled, quick=True)
def _copy(source, target, size, origins, places, lengths):  # type: ignore[no-untyped-def]
    for i in range(len(origins)):
        _memcpy(target + places[i] * size, source + origins[i] * size, lengths[i] * size)

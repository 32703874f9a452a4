"""Compiled function that copies many ranges between CPU buffers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numba import types
from numpy.typing import NDArray

from hydragraph.kernels.numba_compiler import compiled

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


def copy_ranges(source: Tensor, target: Tensor, offsets: tuple[Ints, ...]) -> None:
    """Copy ranges between two CPU buffers of equal element size that do not overlap.

    Args:
        source, target: 1-D and contiguous; not checked.
        offsets: source offsets, target offsets and lengths, [R] each, in elements.
    """
    _copy(source.data_ptr(), target.data_ptr(), source.dtype.itemsize, *offsets)


@partial(compiled, quick=True)
def _copy(source: int, target: int, size: int, origins: Ints, places: Ints, lengths: Ints) -> None:
    for i in range(len(origins)):
        _memcpy(target + places[i] * size, source + origins[i] * size, lengths[i] * size)

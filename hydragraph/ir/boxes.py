"""Decomposition of an interval of a flattened tensor into axis-aligned boxes.

For example, elements [3, 11) of a tensor [3, 4] are one element of row 0, all of row 1, and three of row 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Axis-aligned box in a tensor.

    Attributes:
        at: start of the box's elements in the interval, where they are consecutive.
    """

    offsets: Extent
    sizes: Extent
    at: int

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def moved(self, dim: int) -> Box:
        """Return the box after the tensor's dimension 0 is moved to `dim`."""
        return Box(_moved(self.offsets, dim), _moved(self.sizes, dim), self.at)


def boxes(lo: int, hi: int, shape: Extent) -> tuple[Box, ...]:
    """Split elements [lo, hi) of a row-major tensor into at most `2 * len(shape) - 1` boxes, in order."""
    assert 0 <= lo <= hi <= math.prod(shape), f"[{lo}, {hi}) is not inside a tensor of shape {shape}"
    return tuple(_cut(lo, hi, shape, (), 0))


def _cut(lo: int, hi: int, shape: Extent, prefix: Extent, at: int) -> list[Box]:
    if lo == hi:
        return []
    if not shape:
        return [Box(prefix, (1,) * len(prefix), at)]
    # [first, last): whole rows of the interval. For [3, 11) of [3, 4]: [1, 2), between a head of 1
    # element and a tail of 3.
    row = math.prod(shape[1:])
    first = -(-lo // row)
    last = hi // row
    # An interval without a row boundary lies in row `last`.
    if first > last:
        return _cut(lo - last * row, hi - last * row, shape[1:], (*prefix, last), at)
    head = _cut(lo - (first - 1) * row, row, shape[1:], (*prefix, first - 1), at) if lo < first * row else []
    whole: list[Box] = []
    if first < last:
        offsets = (*prefix, first, *(0 for _ in shape[1:]))
        sizes = (*(1 for _ in prefix), last - first, *shape[1:])
        whole = [Box(offsets, sizes, at + first * row - lo)]
    tail = _cut(0, hi - last * row, shape[1:], (*prefix, last), at + last * row - lo)
    return head + whole + tail


def _moved(extent: Extent, dim: int) -> Extent:
    first, *rest = extent
    return (*rest[:dim], first, *rest[dim:])

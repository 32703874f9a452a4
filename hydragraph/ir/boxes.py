"""Geometry of a checkpoint: an interval of a flattened tensor as axis-aligned boxes.

A rank owns an interval of a parameter's canonical order; a checkpoint stores boxes of its natural shape.

Worked example: [3, 11) of a tensor of shape [3, 4], whose row r is the elements [4 r, 4 r + 4). Row 1 is whole.

    offsets (0, 3)  sizes (1, 1)  at 0    the end of row 0: element 3
    offsets (1, 0)  sizes (1, 4)  at 1    the whole row 1: elements 4 to 7
    offsets (2, 0)  sizes (1, 3)  at 5    the beginning of row 2: elements 8 to 10
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Axis-aligned part of a tensor whose elements, row by row, are consecutive in an interval.

    Attributes:
        sizes: number of indices along each dimension, never 0.
        at: offset of its elements from the start of the interval.
    """

    offsets: Extent
    sizes: Extent
    at: int

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.sizes)

    def moved(self, dim: int) -> Box:
        """Return the box in the tensor whose dimension 0 was moved to `dim`."""
        return Box(_moved(self.offsets, dim), _moved(self.sizes, dim), self.at)


def boxes(lo: int, hi: int, shape: Extent) -> tuple[Box, ...]:
    """Cut the interval [lo, hi) of a row-major tensor into at most `2 * len(shape) - 1` boxes, in order.

    Args:
        lo, hi: an interval of the flattened tensor; an empty one has no boxes.
        shape: shape of the tensor; `()` is a single element.
    """
    assert 0 <= lo <= hi <= math.prod(shape), f"[{lo}, {hi}) is not inside a tensor of shape {shape}"
    return tuple(_cut(lo, hi, shape, (), 0))


def _cut(lo: int, hi: int, shape: Extent, prefix: Extent, at: int) -> list[Box]:
    if lo == hi:
        return []
    if not shape:
        return [Box(prefix, (1,) * len(prefix), at)]
    row = math.prod(shape[1:])
    first = -(-lo // row)
    last = hi // row
    # Without a row boundary, the interval is inside row `last`, a tensor with one dimension less.
    if first > last:
        return _cut(lo - last * row, hi - last * row, shape[1:], (*prefix, last), at)
    # Whole rows, preceded by the end of one row and followed by the beginning of another. Both touch an end of their
    # row, so each leaves one partial end: a dimension adds two boxes.
    head = _cut(lo - (first - 1) * row, row, shape[1:], (*prefix, first - 1), at) if lo < first * row else []
    whole = []
    if first < last:
        offsets = (*prefix, first, *(0 for _ in shape[1:]))
        sizes = (*(1 for _ in prefix), last - first, *shape[1:])
        whole = [Box(offsets, sizes, at + first * row - lo)]
    tail = _cut(0, hi - last * row, shape[1:], (*prefix, last), at + last * row - lo)
    return head + whole + tail


def _moved(extent: Extent, dim: int) -> Extent:
    first, *rest = extent
    return (*rest[:dim], first, *rest[dim:])

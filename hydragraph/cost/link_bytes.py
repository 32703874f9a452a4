"""Exact bytes that pulls and pushes move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.ir.layout import Ints
from hydragraph.ir.link import copy, hand_on, reduce
from hydragraph.ir.program import Program
from hydragraph.passes.weight_layouts import BucketLayouts

Direction = Literal["pull", "push"]
DIRECTIONS: tuple[Direction, ...] = ("pull", "push")


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes moved by pulls, or by pushes.

    Attributes:
        src, dst: sender and receiver of each pair of different ranks, int64, sorted.
        size: bytes of each pair, int64.
        local: bytes that do not leave their rank.
    """

    src: Ints
    dst: Ints
    size: Ints
    local: int

    @staticmethod
    def of(pairs: Mapping[tuple[int, int], int], local: int) -> Traffic:
        rows = np.array([(*pair, size) for pair, size in sorted(pairs.items())], np.int64).reshape(-1, 3)
        return Traffic(rows[:, 0], rows[:, 1], rows[:, 2], local)

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], int]:
        """Bytes by sender and receiver."""
        pairs = zip(self.src.tolist(), self.dst.tolist(), strict=True)
        return dict(zip(pairs, self.size.tolist(), strict=True))

    @property
    def total(self) -> int:
        return int(self.size.sum())

    @property
    def most(self) -> int:
        loads = (np.bincount(at, self.size) for at in (self.src, self.dst) if len(at))
        return int(max((load.max() for load in loads), default=0))


def traffic(program: Program, placed: Sequence[BucketLayouts], direction: Direction) -> Traffic:
    """Return the traffic of pulling all buckets in the compute dtype, or of pushing trained buckets in fp32."""
    return moved(placed, direction, program.dtype.itemsize)


def moved(placed: Sequence[BucketLayouts], direction: Direction, pulled_bytes: int) -> Traffic:
    # Equal homes share a layout object (`passes.weight_layouts`).
    alike: dict[tuple[int, int], list[BucketLayouts]] = {}
    for bucket in placed:
        if direction == "pull" or bucket.bucket.learns:
            alike.setdefault((id(bucket.home), id(bucket.used)), []).append(bucket)
    parts = [np.zeros((3, 0), np.int64)]
    for (layouts, *_), count in ((buckets, len(buckets)) for buckets in alike.values()):
        pulls = direction == "pull"
        links = (
            [copy(layouts.home, layouts.used)] if pulls else [reduce(layouts.used, layouts.home), hand_on(layouts.home)]
        )
        size = (pulled_bytes if pulls else GRADIENT_BYTES) * count
        parts += [_by_pair(slices.src, slices.dst, (slices.hi - slices.lo) * size) for slices in links]
    src, dst, size = _by_pair(*np.concatenate(parts, axis=1))
    between = src != dst
    return Traffic(src[between], dst[between], size[between], int(size[~between].sum()))


def _by_pair(src: Ints, dst: Ints, size: Ints) -> Ints:
    if not len(src):
        return np.zeros((3, 0), np.int64)
    order = np.lexsort((dst, src))
    src = src[order]
    dst = dst[order]
    first = np.flatnonzero(np.append(True, (np.diff(src) != 0) | (np.diff(dst) != 0)))
    rows: Ints = np.stack((src[first], dst[first], np.add.reduceat(size[order], first)))
    return rows

"""Divisions of ranks into stages of 1, 2, 4, ... consecutive ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from hydragraph.planner.metis.problem import Ints

_CHUNK = 4096


def divisions(ranks: int, stages: int) -> Iterator[Ints]:
    """Yield Metis's divisions of ranks into stages, as arrays [divisions, S].

    As in the improved paper's Table 1 (variance 1, unlimited permutations), stages have at least ranks // stages ranks.
    """
    least = max(1, ranks // stages)
    sizes = [1 << i for i in range(ranks.bit_length()) if 1 << i >= least]
    rows = (row for counts in _counts(ranks, stages, sizes) for row in _orders(counts, stages))
    while chunk := list(islice(rows, _CHUNK)):
        yield np.array(chunk, dtype=np.int64)


def _counts(ranks: int, stages: int, sizes: list[int]) -> Iterator[dict[int, int]]:
    if not sizes:
        if not ranks and not stages:
            yield {}
        return
    *smaller, largest = sizes
    for many in range(min(stages, ranks // largest), -1, -1):
        others = stages - many
        rest = ranks - many * largest
        if others * sizes[0] <= rest <= others * (smaller[-1] if smaller else 0):
            for further in _counts(rest, others, smaller):
                yield {largest: many, **further}


def _orders(left: dict[int, int], stages: int) -> Iterator[tuple[int, ...]]:
    if not stages:
        yield ()
        return
    for size in left:
        if left[size]:
            left[size] -= 1
            for following in _orders(left, stages - 1):
                yield (size, *following)
            left[size] += 1

"""Order of a pipeline's micro-batches."""

from __future__ import annotations

import numpy as np

from hydragraph.ir.layout import Floats, Ints
from hydragraph.kernels.numba_compiler import compiled


@compiled
def longest_to_shortest(costs: Floats) -> Ints:
    count = len(costs)
    descending = np.empty(count, np.int64)
    for j in range(count):
        # Insertion sort is stable and compiles fast.
        at = j
        while at and costs[descending[at - 1]] < costs[j]:
            descending[at] = descending[at - 1]
            at -= 1
        descending[at] = j
    return descending


@compiled
def largest_in_middle(costs: Floats) -> Ints:
    """Return each micro-batch's position in an order that begins and ends with small ones."""
    count = len(costs)
    descending = longest_to_shortest(costs)
    position = np.empty(count, np.int64)
    for i in range(count):
        position[descending[count - 1 - i]] = count - 1 - i // 2 if i % 2 else i // 2
    return position

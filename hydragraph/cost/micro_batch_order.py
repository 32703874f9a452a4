"""Order of a pipeline's micro-batches, and their duration on equal stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost import compiled_replay
from hydragraph.cost.schedule_replay import replayed
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORWARD = 1 / 3


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
    """Return each micro-batch's position in an order that fills and drains the pipeline with small micro-batches."""
    count = len(costs)
    descending = longest_to_shortest(costs)
    position = np.empty(count, np.int64)
    for i in range(count):
        position[descending[count - 1 - i]] = count - 1 - i // 2 if i % 2 else i // 2
    return position


def pipeline_seconds(costs: Sequence[float], stages: int, schedule: str = DEFAULT_SCHEDULE) -> float:
    """Return the seconds that a sequence of micro-batches takes on equal stages.

    Args:
        costs: each micro-batch's seconds on one stage.
    """
    if not costs:
        return 0.0
    rows = np.zeros((len(costs), stages, compiled_replay.PARTS))
    rows[:, :, compiled_replay.FORWARD] = FORWARD * np.array(costs)[:, None]
    rows[:, :, compiled_replay.BACKWARD] = (1.0 - FORWARD) * np.array(costs)[:, None]
    return float(replayed(rows, schedule).max())

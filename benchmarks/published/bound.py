"""A lower bound on when 1F1B ends, for any pipelines on so many devices: what no plan can beat.

Stages of a pipeline take the same time t for a micro-batch, a part of it forward. Its last stage cannot begin before
the first forward has passed PP - 1 stages, is busy for the sum of all t, and then the last backward passes as many
stages: the pipeline ends at sum t + (PP - 1) min t or later. Two things follow, by z:

- a pipeline can do at most z - (PP - 1) (c + the work of the shortest sequence), where a sequence of l tokens counts
  as its work and its part of a full micro-batch's overhead, c l / MaxLen;
- a sequence alone takes PP (work + c), as its micro-batch passes all stages forward and back.

Example: PP = 2, c = 1, no limit of memory, two sequences of work 4 on 2 devices. Alone each takes 2 (4 + 1) = 10; by
z the pipeline can do z - 5, and they need 8: the bound is 13. In two micro-batches it ends at 5 + 5 + 5 = 15.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.profile import PipelineCost


def bound_1f1b(kinds: Sequence[PipelineCost], lengths: Sequence[int], devices: int) -> float:
    """Return seconds by which no pipelines of these kinds, on so many devices in all, can be done.

    Raises:
        ValueError: a sequence is longer than any kind takes.
    """
    tokens = np.array(sorted(n for n in lengths if n), dtype=np.float64)
    if not len(tokens):
        return 0.0
    usable = [k for k in kinds if k.max_len >= 1 and k.devices <= devices]
    if max((k.max_len for k in usable), default=0) < tokens[-1]:
        raise ValueError(f"a sequence of {tokens[-1]:.0f} tokens is longer than any kind of pipeline takes")
    work = np.stack([k.work(tokens) for k in usable], axis=1)
    c = np.array([k.c for k in usable])
    depth = np.array([k.stages for k in usable])
    limit = np.array([k.max_len for k in usable])
    alone = np.where(tokens[:, None] <= limit, depth * (work + c), np.inf)
    cost = work + tokens[:, None] * (c / limit)
    size = np.array([k.devices for k in usable])
    lost = (depth - 1) * (c + work[0])

    # A sequence takes at least its part of a pipeline's time by z, and as much of its devices; the least count.
    def enough(z: float) -> bool:
        room = np.maximum(z - lost, 1e-300)
        needed = np.where(alone <= z, cost * size / room, np.inf)
        return bool(needed.min(1).sum() <= devices)

    low = float(alone.min(1).max())
    if enough(low):
        return low
    high = 2 * low
    while not enough(high):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low

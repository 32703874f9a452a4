"""Maximum number of tokens that fit in a rank's memory.

Peak memory is a maximum of linear functions of the tokens, and thus convex, so Newton's method converges to the unique
answer. The peak is evaluated at multiples of a step that every tensor-parallel degree divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

ROUNDS = 8


class PeakMemory:
    """Peak bytes of a rank, non-decreasing in the tokens per micro-batch.

    Args:
        bytes_at: returns the bytes for a number of tokens that is a multiple of the step.
    """

    def __init__(self, bytes_at: Callable[[int], float], step: int) -> None:
        self._at = cache(bytes_at)
        self._step = step
        self._start = step

    def needs(self, tokens: int) -> float:
        """Return an upper bound on the bytes for `tokens`."""
        return self._at(max(self._step, math.ceil(tokens / self._step) * self._step))

    def most(self, limit: float) -> int:
        """Return the most tokens that fit in `limit` bytes; 0 if less than a step fits or tokens need no memory."""
        if self._at(self._step) > limit:
            return 0
        tokens = 0.0
        at = self._start
        for _ in range(ROUNDS):
            here = self._at(at)
            slope = (self._at(at + self._step) - here) / self._step
            if slope <= 0:
                return 0
            tokens = at + (limit - here) / slope
            before = at
            at = max(self._step, math.floor(tokens / self._step) * self._step)
            behind = at + self._step
            # The peak is convex: the answer is exact if the next step is on the line.
            if at == before or abs(self._at(behind) - (limit + slope * (behind - tokens))) <= 1:
                break
        self._start = at
        return max(0, math.floor(tokens))

"""How many tokens a rank's memory holds: its peak is a largest of lines, evaluated where it is asked for and kept.

A micro-batch's tokens are looked at in whole steps, so that they divide by every tensor-parallel degree; between two
steps the peak is taken to be a line. Newton's method from any step lands at or above the answer, since a largest of
lines is convex, and few further ones reach it. The answer is the same from wherever it starts.

Example: 3 GB of weights and 1 MB a token, later 2 MB a token beside 1 GB: 3 + t / 1000 GB, then 1 + t / 500 GB from
2,000 tokens on. For 9 GB the first line crosses at 6,000, where the second one gives 4,000: the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

ROUNDS = 8  # of Newton's method: a peak of few lines needs three


class Peak:
    """Bytes that a rank holds when it holds most, by the tokens of equal micro-batches; never less for more tokens.

    Args:
        bytes_at: of a number of tokens, a multiple of the step; each is asked for once.
        step: tokens.
    """

    def __init__(self, bytes_at: Callable[[int], float], step: int) -> None:
        self._bytes_at = bytes_at
        self._step = step
        self._known: dict[int, float] = {}
        self._start = step  # near the last answer: the next one is seldom far

    def holds(self, tokens: int, limit: float) -> bool:
        """Return whether so many tokens surely fit; those up to the next step are asked about."""
        return self.needs(tokens) <= limit

    def needs(self, tokens: int) -> float:
        """Return the bytes that so many tokens need at most: those of the next step."""
        return self._at(max(self._step, math.ceil(tokens / self._step) * self._step))

    def most(self, limit: float) -> int:
        """Return the most tokens that fit into so many bytes; 0, where not even a step does, or none matters."""
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
            before, at = at, max(self._step, math.floor(tokens / self._step) * self._step)
            behind = at + self._step
            # Lines bend upwards only: one that goes on to behind the answer has not bent before it.
            if at == before or abs(self._at(behind) - (limit + slope * (behind - tokens))) <= 1:
                break
        self._start = at
        return max(0, math.floor(tokens))

    def _at(self, tokens: int) -> float:
        if tokens not in self._known:
            self._known[tokens] = self._bytes_at(tokens)
        return self._known[tokens]

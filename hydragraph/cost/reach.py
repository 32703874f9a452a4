"""Number of query-key pairs of attention within a window or chunks.

With a window of w tokens, a query attends to at most w keys, including its own; with chunks of c tokens, to keys of its
chunk. Attention over l tokens takes time proportional to q(l), about twice the number of causal pairs:

    no limit  q(l) = l^2
    window w  q(l) = l^2 up to w, and 2 w l - w^2 above
    chunk c   q(l) = floor(l / c) c^2 + (l mod c)^2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AttentionReach:
    """Keys that a query attends to.

    Attributes:
        window: keys are less than `window` tokens away; None: at any distance.
        chunk: keys are in the query's chunk of `chunk` tokens; None: in any chunk.
    """

    window: int | None = None
    chunk: int | None = None

    def pairs(self, length: Any) -> Any:
        if self.chunk is None:
            return self._in_window(length)
        whole, rest = divmod(length, self.chunk)
        return whole * self._in_window(self.chunk) + self._in_window(rest)

    def _in_window(self, length: Any) -> Any:
        near = length if self.window is None else np.minimum(length, self.window)
        return near * (2 * length - near)

    def __str__(self) -> str:
        limits = (("window", self.window), ("chunks of", self.chunk))
        return ", ".join(f"{name} {size:,}" for name, size in limits if size is not None) or "whole sequences"

    @property
    def order(self) -> tuple[float, float]:
        """Sort key (window, chunk), with None as infinity."""
        return self.window or math.inf, self.chunk or math.inf


WHOLE = AttentionReach()

# (reach, seconds per unit of q(l)), sorted by `AttentionReach.order`.
Near = tuple[tuple[AttentionReach, float], ...]


def total(parts: Iterable[tuple[float, Near]]) -> Near:
    sums: dict[AttentionReach, float] = {}
    for factor, near in parts:
        for reach, pair_s in near:
            sums[reach] = sums.get(reach, 0.0) + factor * pair_s
    return ordered(sums)


def ordered(sums: dict[AttentionReach, float]) -> Near:
    return tuple((reach, sums[reach]) for reach in sorted(sums, key=lambda each: each.order) if reach != WHOLE)

"""Pairs of a query and a key that attention computes, if a window or chunks limit which keys a query attends to.

Attention over a sequence of l tokens computes l^2 pairs, about half of them if it is causal. With a window of w, a
query attends to at most w keys, itself included; with chunks of c, to keys in its chunk. `Reach.pairs` counts as
l^2 does: twice the pairs of causal attention, without the linear terms of its diagonal.

    window w  q(l) = l^2 up to w, and 2 w l - w^2 above
    chunk c   q(l) = floor(l / c) c^2 + (l mod c)^2

Example: 10 tokens and a window of 4: 2 * 4 * 10 - 4^2 = 64 instead of 100. Exactly, causal queries attend to
1 + 2 + 3 + 7 * 4 = 34 keys, which is (64 + 4) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reach:
    """The keys that a query attends to.

    Attributes:
        window: those less than this many tokens away; None: any.
        chunk: those in its chunk of this many tokens; None: its whole sequence is one.
    """

    window: int | None = None
    chunk: int | None = None

    def pairs(self, length: Any) -> Any:
        """Return q(l) of a number of tokens, or of an array of them; l^2 without a window and chunks."""
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
        """The window and the chunk, infinite if there is none: a sort key, and numbers for compiled code."""
        return self.window or math.inf, self.chunk or math.inf


# Attention to the whole sequence.
WHOLE = Reach()

Near = tuple[tuple[Reach, float], ...]  # seconds per pair of limited attention, each reach once, by `Reach.order`


def total(parts: Iterable[tuple[float, Near]]) -> Near:
    """Return the sum of these coefficients, each multiplied by its factor."""
    sums: dict[Reach, float] = {}
    for factor, near in parts:
        for reach, pair_s in near:
            sums[reach] = sums.get(reach, 0.0) + factor * pair_s
    return ordered(sums)


def ordered(sums: dict[Reach, float]) -> Near:
    """Return the coefficients of limited attention by `Reach.order`."""
    return tuple((reach, sums[reach]) for reach in sorted(sums, key=lambda each: each.order) if reach != WHOLE)

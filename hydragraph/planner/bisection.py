"""Bisection of monotonic conditions."""

from __future__ import annotations

from collections.abc import Callable


def bisect(holds: Callable[[float], bool], low: float, high: float, precision: float) -> tuple[float, float]:
    """Narrow `low` (where the monotonic condition fails) and `high` (where it holds) to a relative distance of
    `precision`.
    """
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def above(holds: Callable[[float], bool], low: float) -> float:
    high = 2 * low + 1e-12
    while not holds(high):
        high *= 2
    return high

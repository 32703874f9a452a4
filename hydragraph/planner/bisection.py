"""Bisection of monotonic conditions."""

from __future__ import annotations

from collections.abc import Callable


def bisect(holds: Callable[[float], bool], low: float, high: float, precision: float) -> tuple[float, float]:
    """Return two close numbers: a monotonic condition fails for the first and holds for the second.

    The condition must fail for `low` and hold for `high`.

    Args:
        precision: maximum relative distance.
    """
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def above(holds: Callable[[float], bool], low: float) -> float:
    """Return a number above `low` for which a monotonic condition holds."""
    high = 2 * low + 1e-12
    while not holds(high):
        high *= 2
    return high

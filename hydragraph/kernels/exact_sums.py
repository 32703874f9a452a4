"""Order-independent sums: numbers are split into multiples of powers of two, which are summed exactly.

    x = high + low + rest        high: multiple of 2^-24, low: multiple of 2^-62, rest: dropped

A float64 sum of multiples of 2^-24 is exact below 2^29. A float32 above 2^-38 is exact; a smaller one has an error
below 2^-62. See the binned sum of Demmel and Nguyen ("Fast reproducible floating-point summation", 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Maximum absolute value of a summand
LARGEST = 2.0**13
# Maximum number of summands, for which 53 bits are enough
MOST = 2**16
GRIDS = (2.0**-24, 2.0**-62)
# Large enough for sums up to 2^37
LOSS_GRIDS = (2.0**-16, 2.0**-54)
# Large enough for 2^34 squares of at most 1
SQUARE_GRIDS = (2.0**-19, 2.0**-39, 2.0**-59)

# Elements that fit in a core's cache
_RUN = 2**15
_RUN_DEVICE = 2**24


def _shift(grid: float) -> float:
    """Return s such that (x + s) - s is x rounded to a multiple of `grid`."""
    return 1.5 * 2.0**52 * grid


def add(parts: Sequence[Tensor], values: Tensor) -> Tensor:
    """Add values to exact sums, in place.

    Args:
        parts: one sum per grid of `GRIDS`, 1-D float64.
        values: 1-D float32, at most MOST summands per sum over all ranks.

    Returns:
        0-d upper bound of the absolute values; sums are exact if it is at most LARGEST.
    """
    high, low = parts
    first, second = map(_shift, GRIDS)
    run = min(_RUN if values.device.type == "cpu" else _RUN_DEVICE, max(len(values), 1))
    bound = values.new_zeros(())
    rest, rounded = torch.empty(2, run, dtype=torch.float64, device=values.device)
    for at in range(0, len(values), run):
        here = values[at : at + run]
        size = len(here)
        # The norm bounds each value.
        bound = torch.maximum(bound, torch.dot(here, here))
        rest[:size].copy_(here)
        # (x + s) - s rounds x to the grid; the next grid gets the difference.
        torch.add(rest[:size], first, out=rounded[:size]).sub_(first)
        high[at : at + size].add_(rounded[:size])
        low[at : at + size].add_(rest[:size].sub_(rounded[:size]).add_(second).sub_(second))
    return bound.sqrt()


def joined(parts: Sequence[Tensor], into: Tensor) -> Tensor:
    """Write the total of exact sums to `into` and return it; `parts` are overwritten."""
    high, low = parts
    return into.copy_(high.add_(low))


def split(value: Tensor, grids: Sequence[float]) -> Tensor:
    """Split a 0-d number into multiples of the grids, [len(grids)] float64."""
    rest = value.double()
    parts = []
    for grid in grids:
        parts.append((rest + _shift(grid)) - _shift(grid))
        rest = rest - parts[-1]
    return torch.stack(parts)


def largest(vectors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute element, 0-d float64."""
    maxima = [torch.stack(torch.aminmax(vector)).abs().amax().double() for vector in vectors if len(vector)]
    return torch.stack(maxima).amax() if maxima else torch.zeros((), dtype=torch.float64, device=device)


def scale_of(largest: float) -> float:
    """Return a power of two p with p * largest < 1; 1 if `largest` is not finite."""
    return 2.0 ** -math.frexp(largest)[1] if math.isfinite(largest) else 1.0


def squares(vectors: Sequence[Tensor], scale: float, device: torch.device) -> Tensor:
    """Return the sum of all (scale x)^2 as parts [3], float64; part i is a multiple of SQUARE_GRIDS[i].

    If scaled elements are below 1, results of several calls add up exactly.
    """
    total = torch.zeros(len(SQUARE_GRIDS), dtype=torch.float64, device=device)
    run = _RUN if device.type == "cpu" else _RUN_DEVICE
    for vector in vectors:
        for at in range(0, len(vector), run):
            rest = vector[at : at + run].double().mul_(scale).square_()
            for i, grid in enumerate(SQUARE_GRIDS):
                rounded = (rest + _shift(grid)).sub_(_shift(grid))
                total[i] += rounded.sum()
                rest -= rounded
    return total

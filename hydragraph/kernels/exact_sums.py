"""Order-independent sums: every number is rounded to multiples of fixed powers of two, which are summed exactly.

    x = high + low + rest        high: a multiple of 2^-24, low: of 2^-62, both by rounding to nearest; rest: dropped

A float64 has 53 bits, so a sum of multiples of 2^-24 is exact below 2^29, whatever the grouping of the summands;
likewise the sum of low parts. A float32 above 2^-38 (4e-12) is exact, a smaller one is off by less than 2^-62 (2e-19).
This is the binned sum of Demmel and Nguyen ("Fast reproducible floating-point summation", 2013), with fixed bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 2.0**13  # bound of the summands
MOST = 2**16  # number of summands: 2^13 x 2^16 is what 53 bits of multiples of 2^-24 hold
GRIDS = (2.0**-24, 2.0**-62)
LOSS_GRIDS = (2.0**-16, 2.0**-54)  # for losses, which are sums over tokens: up to 2^37 in total
SQUARE_GRIDS = (2.0**-19, 2.0**-39, 2.0**-59)  # for numbers up to 1, and up to 2^34 of them

_RUN = 2**15  # elements at a time, to fit in a core's cache
_RUN_DEVICE = 2**24


def _shift(grid: float) -> float:
    """Return the number that, added and subtracted again, rounds to multiples of `grid`."""
    return 1.5 * 2.0**52 * grid


def add(parts: Sequence[Tensor], values: Tensor) -> Tensor:
    """Add values to exact sums, in place.

    Args:
        parts: 1-D float64 of the same length: the sums of the multiples of each of `GRIDS`.
        values: 1-D float32. At most MOST values per element, counting all ranks.

    Returns:
        0-d, an upper bound of the absolute values: up to LARGEST, sums are exact.
    """
    high, low = parts
    first, second = map(_shift, GRIDS)
    run = min(_RUN if values.device.type == "cpu" else _RUN_DEVICE, max(len(values), 1))
    bound = values.new_zeros(())
    rest, rounded = torch.empty(2, run, dtype=torch.float64, device=values.device)
    for at in range(0, len(values), run):
        here = values[at : at + run]
        size = len(here)
        bound = torch.maximum(bound, torch.dot(here, here))
        rest[:size].copy_(here)
        torch.add(rest[:size], first, out=rounded[:size]).sub_(first)
        high[at : at + size].add_(rounded[:size])
        low[at : at + size].add_(rest[:size].sub_(rounded[:size]).add_(second).sub_(second))
    return bound.sqrt()


def joined(parts: Sequence[Tensor], into: Tensor) -> Tensor:
    """Write exact sums to a tensor of another dtype, and return it; `parts` is overwritten."""
    high, low = parts
    return into.copy_(high.add_(low))


def split(value: Tensor, grids: Sequence[float]) -> Tensor:
    """Return the parts of a 0-d number on some grids, [len(grids)] float64."""
    rest = value.double()
    parts = []
    for grid in grids:
        parts.append((rest + _shift(grid)) - _shift(grid))
        rest = rest - parts[-1]
    return torch.stack(parts)


def largest(vectors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute element of some 1-D tensors, 0-d float64."""
    maxima = [torch.stack(torch.aminmax(vector)).abs().amax().double() for vector in vectors if len(vector)]
    return torch.stack(maxima).amax() if maxima else torch.zeros((), dtype=torch.float64, device=device)


def scale_of(largest: float) -> float:
    """Return the power of two that scales numbers with this maximum below 1; 1 if it is not finite."""
    return 2.0 ** -math.frexp(largest)[1] if math.isfinite(largest) else 1.0


def squares(vectors: Sequence[Tensor], scale: float, device: torch.device) -> Tensor:
    """Return [3] float64: the sum of (scale x)^2 on each of SQUARE_GRIDS, over all elements of 1-D tensors.

    If `scale` brings the elements below 1, the sums of any partition add up to the total exactly.
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

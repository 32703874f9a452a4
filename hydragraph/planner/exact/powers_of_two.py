"""Stages priced by powers of two of layers, as AutoHet profiles them; hydragraph's own profile is per block.

    T(n layers) = sum over the binary digits of n of T(2^i layers)    (its equation 5)   `Powers.seconds`

It requires measurements of whole stages of 1, 2, 4, ... layers; `cost` measures one block, and also fits the effect of
lengths. `python benchmarks/plans.py --only profile` compares both with measured stages.

Example: 1, 2 and 4 layers take 1.1, 2.0 and 3.9 s. Five layers are 4 + 1: 5.0 s; seven are 4 + 2 + 1: 7.0 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.errors import Unsupported


@dataclass(frozen=True)
class Powers:
    """Seconds of stages of 1, 2, 4, ... layers, for one kind of stage and one micro-batch."""

    measured: tuple[float, ...]

    def seconds(self, layers: int) -> float:
        """Return the seconds of a stage of `layers` layers.

        Raises:
            Unsupported: a required power of two was not measured.
        """
        if layers.bit_length() > len(self.measured):
            raise Unsupported(
                f"a stage of {layers} layers",
                where="profile by powers of two",
                remedy=f"measure stages of up to {1 << (layers.bit_length() - 1)} layers: {powers_to(layers)}",
            )
        return sum(seconds for i, seconds in enumerate(self.measured) if layers >> i & 1)


def powers_to(layers: int) -> tuple[int, ...]:
    """Return the numbers of layers to measure for stages of up to `layers` layers."""
    return tuple(1 << i for i in range(layers.bit_length()))

"""State of a slow rank, which the next leading rank can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SAME = 1.6  # factor up to which rates count as equal


class Learned(NamedTuple):
    """A rank's measured rate, and the rate that plans use for the rank."""

    known: float
    planned: float

    def goes_for(self, rate: float) -> bool:
        """Return whether a measured rate is roughly between `known` and `planned`, so that `planned` applies."""
        return self.known / SAME <= rate <= max(self.planned, SAME * self.known)


@dataclass(frozen=True)
class Slow:
    """A slow rank.

    Attributes:
        device: slowdown of the device without contention.
        core: further slowdown by other processes on the same core.
        learned: rates learned because other ranks waited for this rank, if any.
    """

    device: float = 1.0
    core: float = 1.0
    learned: Learned | None = None

    @property
    def rate(self) -> float:
        return self.device * self.core

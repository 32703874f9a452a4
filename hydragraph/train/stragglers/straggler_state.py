"""State of a slow rank, kept for the next leading rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SAME = 1.6  # factor up to which rates count as equal


class Learned(NamedTuple):
    """A rank's known rate, and the rate that it is planned with."""

    known: float
    planned: float

    def goes_for(self, rate: float) -> bool:
        """Return whether this applies to a rate, between about the known and the planned one."""
        return self.known / SAME <= rate <= max(self.planned, SAME * self.known)


@dataclass(frozen=True)
class Slow:
    """A slow rank.

    Attributes:
        device: slowdown of the device, alone on its core.
        core: further slowdown by other processes on its core.
        learned: set if others waited for it.
    """

    device: float = 1.0
    core: float = 1.0
    learned: Learned | None = None

    @property
    def rate(self) -> float:
        return self.device * self.core

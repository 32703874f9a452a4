"""State of a slow rank, for the next leading rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Rates that differ by at most this factor count as equal
SAME = 1.6


class LearnedSlowdown(NamedTuple):
    """A rank's measured slowdown (`known`), and the one that plans assume (`planned`)."""

    known: float
    planned: float

    def goes_for(self, rate: float) -> bool:
        """Return whether plans should still assume `planned` for a measured rate."""
        return self.known / SAME <= rate <= max(self.planned, SAME * self.known)


@dataclass(frozen=True)
class SlowRank:
    """A slow rank.

    Attributes:
        device: slowdown of the device, without contention for the core.
        core: additional slowdown by other processes on the core.
        learned: set if other ranks waited for this rank.
    """

    device: float = 1.0
    core: float = 1.0
    learned: LearnedSlowdown | None = None

    @property
    def rate(self) -> float:
        return self.device * self.core

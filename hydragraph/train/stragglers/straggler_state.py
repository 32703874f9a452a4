"""State of a slow rank, kept for the next leading rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slow:
    """A slow rank.

    Attributes:
        device: slowdown of the device, alone on its core.
        core: further slowdown by other processes on its core.
        learned: (known, planned) rates if others waited for it beyond its known rate.
    """

    device: float = 1.0
    core: float = 1.0
    learned: tuple[float, float] | None = None

    @property
    def rate(self) -> float:
        return self.device * self.core

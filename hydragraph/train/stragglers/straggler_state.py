"""State of a slow rank: what the next leading rank needs to continue as if it had measured the rank itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slow:
    """A slow rank.

    Attributes:
        device: slowdown of the device relative to a healthy one, alone on its core.
        core: further slowdown by other processes on its core.
        learned: its known rate when others were seen to wait for it, and its planned rate since; None:
            others do not wait for it beyond its rate.
    """

    device: float = 1.0
    core: float = 1.0
    learned: tuple[float, float] | None = None

    @property
    def rate(self) -> float:
        """The slowdown in total."""
        return self.device * self.core

"""What is known of a slow rank: all that the rank that leads next needs to go on as if it had found it out itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slow:
    """A slow rank.

    Attributes:
        device: how many times as long it takes as a healthy one, alone on its core.
        core: how many times as long beyond that, as others want its core.
        learned: the rate with which others were seen to wait for it, and the one it is planned as since; None: nobody
            waits for it beyond its rate.
    """

    device: float = 1.0
    core: float = 1.0
    learned: tuple[float, float] | None = None

    @property
    def rate(self) -> float:
        """How many times as long it takes in all."""
        return self.device * self.core

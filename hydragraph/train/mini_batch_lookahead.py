"""Mini-batches read slightly ahead of training, so that they can be announced to the planner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hydragraph.data.mini_batches import Drawn


class Source(Protocol):
    """An endless stream of mini-batches with a position."""

    def __next__(self) -> list[Drawn]:
        """Return the next mini-batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last mini-batch."""


class Ahead:
    """Reads mini-batches ahead, at least one, which ranks agree on early (`hydragraph.engine.step_agreement`).

    Attributes:
        position: of the source after the mini-batch returned last, where a resumed run must continue.
    """

    def __init__(self, source: Source, count: int, announce: Callable[[Sequence[Drawn]], None]) -> None:
        """Start reading at the current position of a source.

        Args:
            count: number of mini-batches planned ahead of the one being trained.
            announce: called once with each mini-batch, if `count` is not 0.
        """
        self._source = source
        self._count = count
        self._announce = announce
        self._waiting: deque[tuple[list[Drawn], dict[str, Any]]] = deque()
        self.position = dict(source.state_dict())

    @property
    def following(self) -> list[Drawn] | None:
        """The mini-batch after the one returned last; None: no further ones are needed."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, left: int) -> list[Drawn]:
        """Return the next mini-batch."""
        upcoming = min(left, 1 + max(1, self._count))
        while len(self._waiting) < upcoming:
            batch = next(self._source)
            if self._count:
                self._announce(batch)
            self._waiting.append((batch, dict(self._source.state_dict())))
        batch, self.position = self._waiting.popleft()
        return batch

"""Mini-batches read a little ahead of training, so that what is to come can be announced to the planner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hydragraph.data.mini_batches import Drawn


class Source(Protocol):
    """Endless mini-batches that know their position."""

    def __next__(self) -> list[Drawn]:
        """Return the next mini-batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last one."""


class Ahead:
    """Reads mini-batches ahead, at least one, which ranks agree on early (`hydragraph.engine.step_agreement`).

    Attributes:
        position: of the source behind the mini-batch returned last: where a resumed run must go on.
    """

    def __init__(self, source: Source, count: int, announce: Callable[[Sequence[Drawn]], None]) -> None:
        """Begin to read where a source is.

        Args:
            count: how many are planned ahead of the one that is trained.
            announce: called with each one once, if any is.
        """
        self._source = source
        self._count = count
        self._announce = announce
        self._waiting: deque[tuple[list[Drawn], dict[str, Any]]] = deque()
        self.position = dict(source.state_dict())

    @property
    def following(self) -> list[Drawn] | None:
        """The mini-batch behind the one returned last; None: nothing behind that is needed."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, left: int) -> list[Drawn]:
        """Return the next mini-batch.

        Args:
            left: how many are still needed, this one included.
        """
        upcoming = min(left, 1 + max(1, self._count))
        while len(self._waiting) < upcoming:
            batch = next(self._source)
            if self._count:
                self._announce(batch)
            self._waiting.append((batch, dict(self._source.state_dict())))
        batch, self.position = self._waiting.popleft()
        return batch

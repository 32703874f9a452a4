"""Mini-batches read in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hydragraph.data.mini_batches import Drawn, Mixture


class MiniBatchLookahead:
    """Stream that reads mini-batches ahead (`hydragraph.engine.step_agreement`).

    Attributes:
        position: state of `source` after the mini-batch that `take` last returned.
    """

    def __init__(self, source: Mixture, count: int, announce: Callable[[Sequence[Drawn]], None]) -> None:
        self._source = source
        self._count = count
        self._announce = announce
        self._waiting: deque[tuple[list[Drawn], dict[str, Any]]] = deque()
        self.position = dict(source.state_dict())

    @property
    def following(self) -> list[Drawn] | None:
        return self._waiting[0][0] if self._waiting else None

    def take(self, left: int) -> list[Drawn]:
        # At least one more than this step's: `following` must be known before the step ends.
        upcoming = min(left, 1 + max(1, self._count))
        while len(self._waiting) < upcoming:
            batch = next(self._source)
            if self._count:
                self._announce(batch)
            self._waiting.append((batch, dict(self._source.state_dict())))
        batch, self.position = self._waiting.popleft()
        return batch

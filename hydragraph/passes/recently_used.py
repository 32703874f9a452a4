"""Cache that keeps the most recently used values."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

_LOG = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self._capacity:
                _, dropped = self._values.popitem(last=False)
                _LOG.info("dropped the least recently used %s: %d are kept", type(dropped).__name__, self._capacity)
        self._values.move_to_end(key)
        return self._values[key]

    def items(self) -> Iterable[tuple[K, V]]:
        return self._values.items()

    def __len__(self) -> int:
        return len(self._values)

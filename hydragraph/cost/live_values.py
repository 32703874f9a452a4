"""Live values of a rank, and their storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

Storage = tuple[str, str]


class LiveValues:
    """Live values, which can share storages."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.total = 0
        self._sizes: dict[Storage, int] = {}
        self._users: Counter[Storage] = Counter()
        self._values: dict[str, tuple[Storage, ...]] = {}

    def __contains__(self, value: str) -> bool:
        return value in self._values

    def add(self, value: str, part: str, size: int, *shared: str, named: Container[str] | None = None) -> None:
        """Add a live value that has its own storage and keeps the storages of `shared` values alive.

        Args:
            named: only keep storages that these values allocated; None: all.
        """
        self._sizes[part, value] = size
        kept = (s for other in shared for s in self._values.get(other, ()) if named is None or s[1] in named)
        storages = ((part, value), *kept)
        self._values[value] = storages
        for storage in storages:
            self._users[storage] += 1
            if self._users[storage] == 1:
                self.sums[storage[0]] += self._sizes[storage]
                self.total += self._sizes[storage]

    def shrink(self, value: str, part: str, size: int) -> None:
        """Remove bytes from a live value's own storage, because another value now owns them."""
        self._sizes[part, value] -= size
        self.sums[part] -= size
        self.total -= size

    def drop(self, *values: str) -> None:
        for value in values:
            for storage in self._values.pop(value, ()):
                self._users[storage] -= 1
                if not self._users[storage]:
                    self.sums[storage[0]] -= self._sizes[storage]
                    self.total -= self._sizes[storage]

"""Values that come and go, the storages that they share, and the bytes of those that somebody still keeps."""

from __future__ import annotations

from collections import Counter

Storage = tuple[str, str]  # the attribute of Memory that it belongs to, and a name


class Alive:
    """Values and the storages that each of them keeps."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.total = 0  # of all parts
        self._sizes: dict[Storage, int] = {}
        self._users: Counter[Storage] = Counter()
        self._values: dict[str, tuple[Storage, ...]] = {}

    def __contains__(self, value: str) -> bool:
        return value in self._values

    def add(self, value: str, part: str, size: int, *shared: str) -> None:
        """Let a value begin, with a storage of its own, and keeping those of some other values too."""
        self._sizes[part, value] = size
        storages = ((part, value), *(s for other in shared for s in self._values.get(other, ())))
        self._values[value] = storages
        for storage in storages:
            self._users[storage] += 1
            if self._users[storage] == 1:
                self.sums[storage[0]] += self._sizes[storage]
                self.total += self._sizes[storage]

    def drop(self, *values: str) -> None:
        """End values; what none is left to keep goes."""
        for value in values:
            for storage in self._values.pop(value, ()):
                self._users[storage] -= 1
                if not self._users[storage]:
                    self.sums[storage[0]] -= self._sizes[storage]
                    self.total -= self._sizes[storage]

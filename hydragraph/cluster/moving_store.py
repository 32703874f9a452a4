"""A rank's clients of a store that moves to each newly elected leader's machine.

Each machine's supervisor writes the store's address to a file. Ranks repeat their writes on the new store.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hydragraph.cluster.failure.open_sockets import open_sockets, shut_down
from hydragraph.cluster.processes.rendezvous_stores import client
from hydragraph.data.atomic_write import write_whole

T = TypeVar("T")

_FILE = "leader"
_WAIT_S = 0.05
_CONNECT_S = 2.0


def write_address(folder: str, host: str, port: int) -> None:
    write_whole(Path(folder) / _FILE, json.dumps([host, port]))


def follows(folder: str | None) -> bool:
    return folder is not None and (Path(folder) / _FILE).exists()


class MovingStore:
    """A rank's clients of the current store.

    Args:
        folder: private folder of the machine's supervisor.
        moved: called on another thread after the store has moved.
    """

    def __init__(self, folder: str, moved: Callable[[], None]) -> None:
        self._file = Path(folder) / _FILE
        self._moved = moved
        self._text = self._file.read_text()
        self._sockets: set[tuple[int, str]] = set()
        self._written: dict[str, str] = {}
        self._lines: list[MovingStoreClient] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._follow, name="hydragraph-store", daemon=True).start()

    def connect(self) -> Any:
        """Return a new client, which is disconnected when the store moves."""
        host, port = json.loads(self._text)
        # Fails fast, whereas `client` may wait long
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        before = open_sockets()
        try:
            return client(host, port)
        finally:
            # _sockets: (descriptor, inode) of clients' connections to the current store
            self._sockets |= open_sockets() - before

    def line(self) -> MovingStoreClient:
        line = MovingStoreClient(self, self.connect())
        self._lines.append(line)
        return line

    def write(self, line: MovingStoreClient, key: str, value: str) -> None:
        with self._lock:
            self._written[key] = value
            line.store.set(key, value)

    def _follow(self) -> None:
        current = self._text
        while True:
            time.sleep(_WAIT_S)
            self._text = self._file.read_text()
            if self._text == current:
                continue
            # Fail calls in progress before new clients exist. If the move fails, `current` stays the same,
            # and the next round repeats it.
            self._moved()
            if self._move():
                current = self._text

    def _move(self) -> bool:
        for descriptor, _ in self._sockets & open_sockets():
            # Requests to a lost store may block for minutes
            shut_down(descriptor)
        self._sockets = set()
        try:
            with self._lock:
                # Requests wait in `_repeated` until `line.store` changes. Then the new,
                # empty store gets this process's values; the lock delays other writes.
                for line in self._lines:
                    line.store = self.connect()
                for key, value in self._written.items():
                    self._lines[0].store.set(key, value)
        except (OSError, RuntimeError):
            return False
        return True


class MovingStoreClient:
    """Client that repeats a request on the next store if its store is lost."""

    def __init__(self, moving: MovingStore, store: Any) -> None:
        self._moving = moving
        self.store = store

    def set(self, key: str, value: str) -> None:
        self._repeated(lambda _: self._moving.write(self, key, value))

    def get(self, key: str) -> bytes:
        value: bytes = self._repeated(lambda store: store.get(key))
        return value

    def find(self, key: str) -> bytes:
        value: bytes = self._repeated(lambda store: store.get(key) if store.check([key]) else b"")
        return value

    def _repeated(self, request: Callable[[Any], T]) -> T:
        while True:
            store = self.store
            try:
                return request(store)
            except RuntimeError:
                while self.store is store:
                    time.sleep(_WAIT_S)

"""A register like etcd's for tests without etcd: in the memory of one process, reached over TCP by the others."""

from __future__ import annotations

import json
from typing import Any

from hydragraph.cluster.processes.rendezvous_stores import client

_KEY = "register"


class StoreRegister:
    """Register in a store of PyTorch; its process must survive, unlike etcd's."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.answers = True

    @staticmethod
    def at(port: int) -> StoreRegister:
        """Return the register in a store on this machine."""
        return StoreRegister(client("127.0.0.1", port))

    def read(self) -> tuple[str, str]:
        lease, record = json.loads(self._text())
        return lease, record

    def swap(self, expected: str, lease: str, record: str | None = None) -> bool:
        before = self._text()
        old, kept = json.loads(before)
        after = json.dumps([lease, kept if record is None else record])
        return bool(old == expected and self._store.compare_set(_KEY, before, after).decode() == after)

    def _text(self) -> str:
        if not self.answers:
            raise ConnectionError("the register does not answer")
        text: str = self._store.compare_set(_KEY, "", json.dumps(["", ""])).decode()
        return text

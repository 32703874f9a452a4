"""Where a supervisor and its members speak: a few keys of a store, each written by one of them only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.rendezvous.protocol import Generation, Orders, Said

_KEY = "hydragraph/meeting"


@dataclass(frozen=True)
class Peer:
    """A process, as it is told to people.

    Attributes:
        member: its number.
        seat: whose place it takes: the rank that it, or the one it stands in for, had at first.
        pid, host, device: where it runs, and on what it computes; "" until it has said so.
        node: of several machines, which.
    """

    member: int
    seat: int
    pid: int
    host: str
    device: str = ""
    node: int = 0


class Place:
    """Reads and writes these keys.

    Args:
        store: the one that all reach.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def order(self, orders: Orders) -> None:
        """Write the coordinator's orders."""
        self._store.set(f"{_KEY}/orders", json.dumps(asdict(orders)))

    def orders(self) -> Orders:
        """Return them; they are written before any member starts."""
        record = json.loads(self._store.get(f"{_KEY}/orders"))
        record["proposal"] = Generation(**_tuples(record["proposal"]))
        return Orders(**_tuples(record))

    def say(self, member: int, said: Said) -> None:
        """Write what a member says."""
        self._store.set(f"{_KEY}/said/{member}", json.dumps(asdict(said)))

    def said(self, member: int) -> Said:
        """Return what a member says; it is written for it before it starts."""
        return Said(**_tuples(json.loads(self._store.get(f"{_KEY}/said/{member}"))))

    def introduce(self, peer: Peer) -> None:
        """Tell of a process."""
        self._store.set(f"{_KEY}/peer/{peer.member}", json.dumps(asdict(peer)))

    def peer(self, member: int) -> Peer:
        """Return what was told of a process; that is done before it starts."""
        return Peer(**json.loads(self._store.get(f"{_KEY}/peer/{member}")))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with tuples for JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def prefix(number: int) -> str:
    """Return what the keys of a generation begin with."""
    return f"g{number}"

"""Registers of a supervisor and its members: a few keys of a store, each with a single writer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.rendezvous.protocol import Generation, Orders, Said

_KEY = "hydragraph/meeting"


@dataclass(frozen=True)
class Peer:
    """Public description of a process.

    Attributes:
        seat: its seat: the initial rank of the process itself, or of the one it replaces.
        pid, host, device: process id, host and compute device; "" until reported.
        node: index of its machine, if there are several.
    """

    member: int
    seat: int
    pid: int
    host: str
    device: str = ""
    node: int = 0


@dataclass(frozen=True, eq=False)
class Registers:
    """Reads and writes these keys."""

    store: Store

    def order(self, orders: Orders) -> None:
        """Write the coordinator's orders."""
        self.store.set(f"{_KEY}/orders", json.dumps(asdict(orders)))

    def orders(self) -> Orders:
        """Return the coordinator's orders, which exist before any member starts."""
        record = json.loads(self.store.get(f"{_KEY}/orders"))
        record["proposal"] = Generation(**_tuples(record["proposal"]))
        return Orders(**_tuples(record))

    def say(self, member: int, said: Said) -> None:
        """Write a member's register."""
        self.store.set(f"{_KEY}/said/{member}", json.dumps(asdict(said)))

    def said(self, member: int) -> Said:
        """Return a member's register, which exists before the member starts."""
        return Said(**_tuples(json.loads(self.store.get(f"{_KEY}/said/{member}"))))

    def introduce(self, peer: Peer) -> None:
        """Write the description of a process."""
        self.store.set(f"{_KEY}/peer/{peer.member}", json.dumps(asdict(peer)))

    def peer(self, member: int) -> Peer:
        """Return the description of a process, which exists before the process starts."""
        return Peer(**json.loads(self.store.get(f"{_KEY}/peer/{member}")))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with JSON's lists converted to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def prefix(number: int) -> str:
    """Return the prefix of a generation's keys."""
    return f"g{number}"

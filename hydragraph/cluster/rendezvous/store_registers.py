"""Registers of a supervisor and its members: keys of a store, each with one writer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hydragraph.cluster.moving_store import MovingStoreClient
from hydragraph.cluster.rendezvous.protocol import CoordinatorRegister, CoordinatorState, Generation, MemberRegister

_KEY = "hydragraph/meeting"


@dataclass(frozen=True)
class MemberDescription:
    """Public description of a process; `seat` is the initial rank of the process, or of the one that it replaces."""

    member: int
    seat: int
    pid: int
    host: str
    node: int = 0


@dataclass(frozen=True, eq=False)
class Registers:
    """Reads and writes the registers; a member's registers exist before it starts."""

    store: Any

    def order(self, orders: CoordinatorRegister) -> None:
        self.store.set(f"{_KEY}/orders", json.dumps(asdict(orders)))

    def orders(self) -> CoordinatorRegister:
        return _orders(json.loads(self.store.get(f"{_KEY}/orders")))

    def say(self, member: int, said: MemberRegister) -> None:
        self.store.set(f"{_KEY}/said/{member}", json.dumps(asdict(said)))

    def said(self, member: int) -> MemberRegister:
        return MemberRegister(**_tuples(json.loads(self.store.get(f"{_KEY}/said/{member}"))))

    def introduce(self, peer: MemberDescription) -> None:
        self.store.set(f"{_KEY}/peer/{peer.member}", json.dumps(asdict(peer)))

    def adopt(self, peer: MemberDescription, said: MemberRegister) -> None:
        """Write the registers of an earlier leader's member unless they exist."""
        self.store.compare_set(f"{_KEY}/said/{peer.member}", "", json.dumps(asdict(said)))
        self.store.compare_set(f"{_KEY}/peer/{peer.member}", "", json.dumps(asdict(peer)))

    def peer(self, member: int) -> MemberDescription | None:
        """Return a member's description, or None if a moved store has lost it."""
        read = self.store.find if isinstance(self.store, MovingStoreClient) else self.store.get
        text = read(f"{_KEY}/peer/{member}")
        return MemberDescription(**json.loads(text)) if text else None


def record_text(record: CoordinatorState) -> str:
    return json.dumps({"orders": asdict(record.orders), "formed": list(record.formed.items())})


def record_of(text: str) -> CoordinatorState:
    fields = json.loads(text)
    return CoordinatorState(_orders(fields["orders"]), {number: tuple(members) for number, members in fields["formed"]})


def _orders(fields: dict[str, Any]) -> CoordinatorRegister:
    fields["proposal"] = Generation(**_tuples(fields["proposal"]))
    return CoordinatorRegister(**_tuples(fields))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def prefix(number: int) -> str:
    return f"g{number}"

"""Registry of each machine's ranks and progress board, kept in the store; reads never wait."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.failure.heartbeat_board import Board
from hydragraph.cluster.failure.process_liveness import WatchedProcess


@dataclass(frozen=True)
class RollEntry:
    rank: int
    host: str
    process: WatchedProcess


@dataclass(eq=False)
class Roll:
    """Ranks registered in a store, by machine."""

    store: Store
    namespace: str
    machine: str
    _members: list[RollEntry] = field(default_factory=list)
    _machines: list[str] = field(default_factory=list)

    def enter(self, member: RollEntry) -> bool:
        """Add a rank; return whether it is the first of its machine."""
        index = self._add(f"machine/{self.machine}", 1)
        line = [member.rank, member.host, member.process.pid, member.process.started]
        self.store.set(self._key(f"machine/{self.machine}/{index}"), json.dumps(line))
        if index == 1:
            self.store.set(self._key(f"machines/{self._add('machines', 1)}"), self.machine)
        return index == 1

    def board(self, ranks: int) -> Board:
        """Return this machine's board, created by the first caller."""
        board = Board.make(ranks)
        address = self.store.compare_set(self._key(f"board/{self.machine}"), "", board.address).decode()
        if address == board.address:
            return board
        board.close()
        return Board.open(address, ranks)

    def members(self) -> tuple[RollEntry, ...]:
        for index in range(len(self._members) + 1, self._add(f"machine/{self.machine}", 0) + 1):
            line = self._get(f"machine/{self.machine}/{index}")
            if line is None:
                break
            rank, host, pid, started = json.loads(line)
            self._members.append(RollEntry(rank, host, WatchedProcess(pid, started)))
        return tuple(self._members)

    def machines(self) -> tuple[str, ...]:
        for index in range(len(self._machines) + 1, self._add("machines", 0) + 1):
            name = self._get(f"machines/{index}")
            if name is None:
                break
            self._machines.append(name.decode())
        return tuple(self._machines)

    def _add(self, key: str, number: int) -> int:
        return int(self.store.add(self._key(key), number))

    def _get(self, key: str) -> bytes | None:
        name = self._key(key)
        return bytes(self.store.get(name)) if self.store.check([name]) else None

    def _key(self, key: str) -> str:
        return f"{self.namespace}/{key}"

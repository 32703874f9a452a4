"""Registry of each machine's ranks and board, in the store; reads never wait."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

from hydragraph.cluster.failure.heartbeat_board import HeartbeatBoard
from hydragraph.cluster.failure.process_liveness import WatchedProcess


@dataclass(frozen=True)
class RankEntry:
    rank: int
    host: str
    process: WatchedProcess


@dataclass(eq=False)
class RankRegistry:
    store: Store
    namespace: str
    machine: str
    _read: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def enter(self, member: RankEntry) -> bool:
        """Add a rank; return whether it is its machine's first."""
        index = self._add(f"machine/{self.machine}", 1)
        line = [member.rank, member.host, member.process.pid, member.process.started]
        self.store.set(self._key(f"machine/{self.machine}/{index}"), json.dumps(line))
        if index == 1:
            self.store.set(self._key(f"machines/{self._add('machines', 1)}"), self.machine)
        return index == 1

    def board(self, ranks: int) -> HeartbeatBoard:
        """Return this machine's board; the first caller creates it."""
        board = HeartbeatBoard.make(ranks)
        address = self.store.compare_set(self._key(f"board/{self.machine}"), "", board.address).decode()
        if address == board.address:
            return board
        board.close()
        return HeartbeatBoard.open(address, ranks)

    def members(self) -> tuple[RankEntry, ...]:
        lines = map(json.loads, self._entries(f"machine/{self.machine}"))
        return tuple(RankEntry(rank, host, WatchedProcess(pid, started)) for rank, host, pid, started in lines)

    def machines(self) -> tuple[str, ...]:
        return tuple(name.decode() for name in self._entries("machines"))

    def _entries(self, key: str) -> list[bytes]:
        read = self._read[key]
        # `enter` counts an entry before writing it, so the newest may be missing for a moment.
        # Reading stops at a gap, where the next call continues.
        for index in range(len(read) + 1, self._add(key, 0) + 1):
            name = self._key(f"{key}/{index}")
            if not self.store.check([name]):
                break
            read.append(bytes(self.store.get(name)))
        return read

    def _add(self, key: str, number: int) -> int:
        return int(self.store.add(self._key(key), number))

    def _key(self, key: str) -> str:
        return f"{self.namespace}/{key}"

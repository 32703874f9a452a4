"""Where a failure is written down, once for all ranks: a key of the store that the ranks met at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store  # type: ignore[attr-defined]

_DEATH = "hydragraph/death"
NAMESPACE = "hydragraph/watch"  # the key of the newest watch's namespace


@dataclass(frozen=True)
class Fault:
    """The one failure that all ranks agree on: who, at which step and instruction, and what it raised."""

    rank: int
    step: int
    instruction: str
    error: str


class Ledger:
    """The fault's place in a store: written once, read by everybody.

    A store that cannot be reached (its host died) reads as "no fault" from then on; heartbeats have to do.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self._store, self._key = store, f"{namespace}/fault"
        self._lost = False

    def read(self) -> Fault | None:
        """The fault, if one was written."""
        text = self._get(self._key)
        return None if text is None else Fault(**json.loads(text))

    def write(self, fault: Fault) -> Fault:
        """Writes the fault unless there is one; returns the one that stands."""
        text = self._ask(lambda: self._store.compare_set(self._key, "", json.dumps(asdict(fault))))
        return fault if text is None else Fault(**json.loads(text))

    def death(self) -> tuple[int, str] | None:
        """The rank that the launcher saw die, and how."""
        text = self._get(_DEATH)
        if text is None:
            return None
        rank, how = json.loads(text)
        return int(rank), str(how)

    def _get(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _ask(self, question: Callable[[], bytes | None]) -> bytes | None:
        # A client never reconnects, and PyTorch logs every try: one is enough.
        if self._lost:
            return None
        try:
            return question()
        except RuntimeError:
            self._lost = True
            return None


def announce_death(store: Store, rank: int, how: str) -> None:
    """Tells the watches of a launch that a rank died; only the first death counts, others may follow from it."""
    store.compare_set(_DEATH, "", json.dumps([rank, how]))


def last_fault(store: Store) -> Fault | None:
    """The fault of the newest watch over a store, for the launcher that hosts it; None where nothing failed."""
    if not store.check([NAMESPACE]):
        return None
    return Ledger(store, store.get(NAMESPACE).decode()).read()


def own_client() -> Store:
    """A connection of our own to the store that the default process group met at.

    The store beneath all prefixes: the launcher that hosts it knows no prefix of torch's.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.clone()  # type: ignore[attr-defined, no-any-return]

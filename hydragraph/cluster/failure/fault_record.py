"""Record of a failure, written once to the rendezvous store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

_DEATH = "hydragraph/death"
# Key of the newest watch's namespace
NAMESPACE = "hydragraph/watch"


@dataclass(frozen=True)
class Fault:
    """The single failure that all ranks agree on.

    Attributes:
        instruction: the failed rank's instruction or call, if known.
        stalled: whether the rank is alive but makes no progress.
        index: the instruction's index, if the recording process cannot describe the instruction.
    """

    rank: int
    step: int
    instruction: str
    error: str
    host: str = ""
    stalled: bool = False
    index: int | None = None


class FaultRecord:
    """A store's entry for the fault; methods raise a RuntimeError if the store is gone."""

    def __init__(self, store: Store, namespace: str, generation: str = "") -> None:
        self._store = store
        self._deaths = _DEATH + generation
        self._key = f"{namespace}/fault"

    def read(self) -> Fault | None:
        return Fault(**json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None

    def write(self, fault: Fault) -> Fault:
        """Record a fault unless there is one; return the recorded fault."""
        return Fault(**json.loads(self._store.compare_set(self._key, "", json.dumps(asdict(fault)))))

    def death(self) -> tuple[int, str] | None:
        """Return the rank that the launcher reported dead, and how it died, or None."""
        return tuple(json.loads(self._store.get(self._deaths))) if self._store.check([self._deaths]) else None


def announce_death(store: Store, rank: int, how: str, generation: str = "") -> None:
    """Report a rank's death to the watches of its launch; only the first report counts."""
    store.compare_set(_DEATH + generation, "", json.dumps([rank, how]))


def last_fault(store: Store) -> Fault | None:
    if not store.check([NAMESPACE]):
        return None
    return FaultRecord(store, store.get(NAMESPACE).decode()).read()


def root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

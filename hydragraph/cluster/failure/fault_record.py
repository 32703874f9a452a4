"""Where a failure is written down, once for all ranks: a key of the store that the ranks met at."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store  # type: ignore[attr-defined]

_DEATH = "hydragraph/death"
NAMESPACE = "hydragraph/watch"  # the key of the newest watch's namespace


@dataclass(frozen=True)
class Fault:
    """The one failure that all ranks agree on.

    Attributes:
        rank: the rank that failed.
        step: in which step, or after which.
        instruction: at which instruction, or in which call; "" where that is not known.
        error: what it raised, or how it ended.
        host: where it ran; "" where that is not known.
        stalled: whether it lives, and stands still: what every rank is doing is of interest then.
        index: of the instruction, where who wrote this cannot put it into words.
    """

    rank: int
    step: int
    instruction: str
    error: str
    host: str = ""
    stalled: bool = False
    index: int | None = None


class Ledger:
    """The fault's place in a store: written once, read by everybody. A store that is gone raises RuntimeError.

    Args:
        store, namespace: where it is, and what its key begins with.
        generation: which of a launch's ranks, whose deaths the launcher tells.
    """

    def __init__(self, store: Store, namespace: str, generation: str = "") -> None:
        self._store = store
        self._deaths = _DEATH + generation
        self._key = f"{namespace}/fault"

    def read(self) -> Fault | None:
        """Return the fault, if one was written."""
        return Fault(**json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None

    def write(self, fault: Fault) -> Fault:
        """Write the fault unless there is one; return the one that stands."""
        return Fault(**json.loads(self._store.compare_set(self._key, "", json.dumps(asdict(fault)))))

    def death(self) -> tuple[int, str] | None:
        """Return the rank that the launcher saw die, and how."""
        if not self._store.check([self._deaths]):
            return None
        rank, how = json.loads(self._store.get(self._deaths))
        return int(rank), str(how)


def announce_death(store: Store, rank: int, how: str, generation: str = "") -> None:
    """Tell the watches of a launch that a rank died; only the first death counts, others may follow from it.

    Args:
        generation: of its ranks, the name of those that the rank is one of.
    """
    store.compare_set(_DEATH + generation, "", json.dumps([rank, how]))


def last_fault(store: Store) -> Fault | None:
    """Return the fault of the newest watch over a store, for the launcher that hosts it; None where nothing failed."""
    if not store.check([NAMESPACE]):
        return None
    return Ledger(store, store.get(NAMESPACE).decode()).read()


def root(store: Store) -> Store:
    """Return the store beneath all prefixes: the launcher that hosts it knows no prefix of torch's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

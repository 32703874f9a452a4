"""Record of a failure, written once for all ranks under a key of the store where they met."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store  # type: ignore[attr-defined]

_DEATH = "hydragraph/death"
NAMESPACE = "hydragraph/watch"  # the key of the newest watch's namespace


@dataclass(frozen=True)
class Fault:
    """The single failure that all ranks agree on.

    Attributes:
        instruction: its instruction or call; "" if unknown.
        host: its host; "" if unknown.
        stalled: whether it is alive but makes no progress, so that the stacks of all ranks are of interest.
        index: index of the instruction, if the writer of the record cannot describe it.
    """

    rank: int
    step: int
    instruction: str
    error: str
    host: str = ""
    stalled: bool = False
    index: int | None = None


class Ledger:
    """The fault's entry in a store: written once, read by all ranks. Raises RuntimeError if the store is gone.

    Args:
        generation: name of these ranks within a launch, used by the launcher to report deaths.
    """

    def __init__(self, store: Store, namespace: str, generation: str = "") -> None:
        self._store = store
        self._deaths = _DEATH + generation
        self._key = f"{namespace}/fault"

    def read(self) -> Fault | None:
        """Return the fault, if one was written."""
        return Fault(**json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None

    def write(self, fault: Fault) -> Fault:
        """Write the fault unless there is one already; return the recorded one."""
        return Fault(**json.loads(self._store.compare_set(self._key, "", json.dumps(asdict(fault)))))

    def death(self) -> tuple[int, str] | None:
        """Return the rank whose death the launcher saw, and how it died."""
        if not self._store.check([self._deaths]):
            return None
        rank, how = json.loads(self._store.get(self._deaths))
        return int(rank), str(how)


def announce_death(store: Store, rank: int, how: str, generation: str = "") -> None:
    """Report to the watches of a launch that a rank died; only the first death counts, because others may follow from
    it.

    Args:
        generation: name of the rank's generation.
    """
    store.compare_set(_DEATH + generation, "", json.dumps([rank, how]))


def last_fault(store: Store) -> Fault | None:
    """Return the fault of the newest watch over a store, for the launcher that hosts it; None without a failure."""
    if not store.check([NAMESPACE]):
        return None
    return Ledger(store, store.get(NAMESPACE).decode()).read()


def root(store: Store) -> Store:
    """Return the store without prefixes: the launcher that hosts it does not know torch's prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

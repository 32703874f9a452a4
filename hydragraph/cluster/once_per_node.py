"""Results that one rank computes for all ranks of its machine, such as a captured model.

Among a machine's ranks with equal inputs, the highest-numbered computes the result, because rank 0 may plan meanwhile.
It writes a private file, and sends the file's path and hash. A rank that cannot read the file computes its own result.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.cluster.processes.restart_cache import check_private, keep
from hydragraph.cluster.processes.shared_preparation import read_value, write_value
from hydragraph.errors import Unsupported

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class OfferedFile:
    path: str
    digest: str

    @staticmethod
    def of(path: Path) -> OfferedFile:
        with path.open("rb") as file:
            return OfferedFile(str(path), hashlib.file_digest(file, "sha256").hexdigest())

    def read(self) -> object:
        """Return the value, with tensors memory-mapped copy-on-write."""
        path = Path(self.path)
        check_private(path.parent)
        if OfferedFile.of(path).digest != self.digest:
            raise ValueError(f"{self.path} has changed since it was written")
        return read_value(path)


def once_per_machine(
    world: World, what: str, key: str, make: Callable[[], T], meanwhile: Callable[[], object] | None = None
) -> T:
    """Call `make` on one rank of each machine, and return the result on all ranks.

    Args:
        key: text that identifies the inputs; ranks with different keys compute separate results.
        make: called on every rank if the result cannot be pickled.

    Raises:
        Any error of `make`, on the rank that called it. Other ranks raise the same error if it is `Unsupported`, else a
        RuntimeError.
    """
    # places: (node, key) by rank; fellows: ranks with this node and key.
    places = world.gather((world.node, key))
    fellows = [rank for rank, place in enumerate(places) if place == places[world.rank]]
    # returned: empty, or [result], because a result can be None
    returned: list[T] = []
    error: Exception | None = None
    offer: OfferedFile | None = None
    with ExitStack() as owned:
        if world.rank == fellows[-1]:
            try:
                returned.append(make())
                offer = owned.enter_context(_offered(returned[0], what)) if len(fellows) > 1 else None
                keep(returned[0], what, key)
            except Exception as raised:
                error = raised
        elif meanwhile is not None:
            meanwhile()
        # Other ranks wait here for each machine's result or error.
        outcomes = world.gather((offer, _sendable(error, world.rank, what)))
        if error is not None:
            raise agreed(error)
        for _, failure in outcomes:
            if failure is not None:
                raise agreed(failure)
        # The rank that made the file deletes it when `owned` closes, so read
        # it before the last `gather`.
        theirs, _ = outcomes[fellows[-1]]
        if not returned and theirs is not None:
            try:
                returned.append(theirs.read())  # pyrefly: ignore[bad-argument-type]  # what `make` returned there
            except (OSError, ValueError) as refused:
                _LOG.warning(
                    "%s: the result of rank %d cannot be read (%s): computing it again", what, fellows[-1], refused
                )
        # All ranks have finished reading
        world.gather(None)
    return returned[0] if returned else make()


@contextmanager
def _offered(value: object, what: str) -> Iterator[OfferedFile | None]:
    with tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True) as folder:  # mode 0700
        path = Path(folder) / "made"
        try:
            write_value(path, value)
            offer = OfferedFile.of(path)
        except (OSError, ValueError, RuntimeError) as refused:
            _LOG.warning("%s: each rank computes its own result, because results cannot be sent (%s)", what, refused)
            yield None
            return
        yield offer


def _sendable(error: Exception | None, rank: int, what: str) -> Exception | None:
    if error is None or isinstance(error, Unsupported):
        return error
    return RuntimeError(f"{what} on rank {rank}: {type(error).__name__}: {error}")

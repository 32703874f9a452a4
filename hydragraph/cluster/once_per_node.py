"""What one rank of each machine makes, and its other ranks read: a captured model, whatever launcher started them.

    1. all ranks tell where they run and what they would make; of those that agree, the highest makes it: the lowest of
       all plans, which it can get ready for meanwhile
    2. it writes the result into a folder that only its user may enter, and tells where, with the file's hash
    3. the others read it; when all have, the folder goes

A folder has a name of its own that only these ranks learn, so what an ended run left behind is never read. A rank that
cannot read what was written (another file system, a full disk) makes its own, and says so.
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
from hydragraph.cluster.processes.shared_preparation import SharedFile
from hydragraph.errors import Unsupported

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Offer:
    """Where one rank has written what it made.

    Attributes:
        path: of the file.
        digest: SHA-256 of its bytes.
    """

    path: str
    digest: str

    def read(self) -> object:
        """Return what was written; tensors are mapped, privately.

        Raises:
            OSError: the file is not there, or not this user's alone.
            ValueError: it holds something else.
        """
        check_private(Path(self.path).parent)
        with open(self.path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.digest:
                raise ValueError(f"{self.path} is not what was written")
            return SharedFile(file.fileno()).read()


def once_per_machine(
    world: World, what: str, key: str, make: Callable[[], T], meanwhile: Callable[[], object] | None = None
) -> T:
    """Return what a function makes, called by one rank of each machine; all ranks call this.

    Args:
        world: this process's place.
        what: is made, for messages.
        key: what the result depends on; ranks of one machine whose keys differ make their own.
        make: called on the ranks that make it. Its result can be pickled, as what `launch`'s `prepare` returns; where
            it cannot, every rank makes its own.
        meanwhile: called on a rank that waits for it.

    Raises:
        Any error that `make` raised on one rank, on every rank: an `Unsupported` as it was, else a RuntimeError with
            its words.
        RankFailure: another rank died meanwhile.
    """
    places = world.gather((world.node, key))
    fellows = [rank for rank, place in enumerate(places) if place == places[world.rank]]
    made: list[T] = []
    error: Exception | None = None
    offer: Offer | None = None
    with ExitStack() as owned:
        if world.rank == fellows[-1]:
            try:
                made.append(make())
                offer = owned.enter_context(_offered(made[0], what)) if len(fellows) > 1 else None
                keep(made[0], what, key)
            except Exception as raised:
                error = raised
        elif meanwhile is not None:
            meanwhile()
        outcomes = world.gather((offer, _sendable(error, world.rank, what)))
        if error is not None:
            raise agreed(error)
        for _, failure in outcomes:
            if failure is not None:
                raise agreed(failure)
        theirs, _ = outcomes[fellows[-1]]
        if not made and theirs is not None:
            try:
                made.append(theirs.read())  # type: ignore[arg-type]
            except (OSError, ValueError) as refused:
                _LOG.warning("%s: what rank %d made cannot be read (%s): making it again", what, fellows[-1], refused)
        world.gather(None)  # nobody reads any more
    return made[0] if made else make()


@contextmanager
def _offered(value: object, what: str) -> Iterator[Offer | None]:
    """Keep a value in a file while others read it; None where it cannot be written."""
    with tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True) as folder:  # of mode 0700
        path = Path(folder) / "made"
        try:
            with open(path, "w+b") as file:
                SharedFile(file.fileno()).write(value)
                file.seek(0)
                offer = Offer(str(path), hashlib.file_digest(file, "sha256").hexdigest())
        except (OSError, ValueError, RuntimeError) as refused:
            _LOG.warning("%s: it cannot be handed to other ranks, so each makes its own (%s)", what, refused)
            yield None
            return
        yield offer


def _sendable(error: Exception | None, rank: int, what: str) -> Exception | None:
    """Return an error in a form that other ranks can have: not every error can be pickled."""
    if error is None or isinstance(error, Unsupported):
        return error
    return RuntimeError(f"{what} on rank {rank}: {type(error).__name__}: {error}")

"""Current watch of this process, as long as its ranks are the same and none has failed."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.failure.rank_watch import Watch


class _Newest:
    watch: Watch | None = None
    group: object | None = None
    number = 0


def newest_watch() -> Watch | None:
    """Return this process's last watch."""
    return _Newest.watch


def watch_of(group: object, store: Callable[[], Store], rank: int, ranks: int, generation: str = "") -> Watch:
    """Return this process's watch over a process group; a new one after a failure or a close.

    Args:
        group: process group to watch; None: it does not exist yet; the next call passes it.
        store: returns the store where its ranks meet; called only for a new watch.
    """
    newest = _Newest
    if newest.watch is not None and newest.group is None and newest.watch.ranks == ranks:
        newest.group = group
    again = newest.group is group and group is not None
    if again and newest.watch is not None and not (newest.watch.broken or newest.watch.closed):
        return newest.watch
    if newest.watch is not None and not newest.watch.closed:
        newest.watch.close()
    # All ranks count alike, as they see the same failures and make the same calls.
    number = newest.number + 1 if again else 0
    newest.watch = Watch(store(), rank, ranks, number=number, generation=generation)
    newest.group = group
    newest.number = number
    return newest.watch

"""Current watch of this process: one as long as its ranks are the same and none has failed."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.failure.rank_watch import Watch


class _Newest:
    """Last watch of this process, its process group, and its number for that group."""

    watch: Watch | None = None
    group: object | None = None
    number = 0


def newest_watch() -> Watch | None:
    """Return the last watch that this process created."""
    return _Newest.watch


def watch_of(group: object, store: Callable[[], Store], rank: int, ranks: int, generation: str = "") -> Watch:
    """Return this process's watch over a process group; a new one if the last has seen a failure or was closed.

    Args:
        group: process group to watch; None for one that is about to be created: the next group passed is taken to be
            that one.
        store: returns the store where its ranks meet; called only to create a new watch.
        rank, ranks: rank of this process in the group, from 0, and number of ranks.
    """
    newest = _Newest
    if newest.watch is not None and newest.group is None and newest.watch.ranks == ranks:
        newest.group = group
    again = newest.group is group and group is not None
    if again and newest.watch is not None and not (newest.watch.broken or newest.watch.closed):
        return newest.watch
    if newest.watch is not None and not newest.watch.closed:
        newest.watch.close()
    # All ranks count alike, because they see the same failures and make the same calls. So they meet under the same
    # number, and never under one where a failed watch has left its keys.
    number = newest.number + 1 if again else 0
    newest.watch = Watch(store(), rank, ranks, number=number, generation=generation)
    newest.group = group
    newest.number = number
    return newest.watch

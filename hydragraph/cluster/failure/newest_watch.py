"""The watch of this process: one for as long as its ranks are the same and none has failed."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.failure.rank_watch import Watch


class _Newest:
    """The last watch of this process, whose it is, and which of theirs."""

    watch: Watch | None = None
    group: object | None = None
    number = 0


def newest_watch() -> Watch | None:
    """Return the last watch that this process made."""
    return _Newest.watch


def watch_of(group: object, store: Callable[[], Store], rank: int, ranks: int, generation: str = "") -> Watch:
    """Return this process's watch over a process group; a new one where the last has seen a failure or was closed.

    Args:
        group: the process group whose ranks are watched; None for one that is about to be made: the next that is named
            is that one.
        store: returns the store where its ranks meet; called only where a new watch is made.
        rank, ranks: this process's number in the group, from 0, and how many there are.
        generation: a name for these ranks among all that meet at the store.
    """
    newest = _Newest
    if newest.watch is not None and newest.group is None and newest.watch.ranks == ranks:
        newest.group = group
    again = newest.group is group and group is not None
    if again and newest.watch is not None and not (newest.watch.broken or newest.watch.closed):
        return newest.watch
    if newest.watch is not None and not newest.watch.closed:
        newest.watch.close()
    # Ranks count alike, as they see the same failures and make the same calls; so they meet under the same number, and
    # not under one where a failed watch has left its keys.
    number = newest.number + 1 if again else 0
    newest.watch = Watch(store(), rank, ranks, number=number, generation=generation)
    newest.group = group
    newest.number = number
    return newest.watch

"""This process's failure watch."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from hydragraph.cluster.failure.rank_watch import RankWatch


class _Newest:
    watch: RankWatch | None = None
    group: object | None = None
    number = 0


def newest_watch() -> RankWatch | None:
    return _Newest.watch


def watch_of(group: object, store: Callable[[], Store], rank: int, ranks: int, generation: str = "") -> RankWatch:
    """Return this process's watch over a process group; a broken or closed watch is replaced.

    Args:
        group: None before the process group exists.
        store: called only if a new watch is needed.
    """
    newest = _Newest
    last = newest.watch
    # Bind a watch created before its group (`member.meet`) to the group.
    if last is not None and newest.group is None and last.ranks == ranks:
        newest.group = group
    again = newest.group is group and group is not None
    if last is not None and not last.closed:
        if again and not last.broken:
            return last
        last.close()
    # `number` is equal on all ranks.
    newest.number = newest.number + 1 if again else 0
    newest.watch = RankWatch(store(), rank, ranks, number=newest.number, generation=generation)
    newest.group = group
    return newest.watch

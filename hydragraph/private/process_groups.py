"""The process groups of torch.distributed, let go of without waiting for what they still have under way."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def drop_all() -> None:
    """Forget all process groups, the default one too, so that another may be made; nothing is waited for.

    gloo's destructor waits for operations under way, of which a broken one may never end: a thread of its own waits,
    without the interpreter's lock. Names of groups are counted from 0 again, also where making one was given up: ranks
    that meet must count alike.
    """
    groups = list(distributed_c10d._world.pg_names)
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0
    drop(groups)


def drop(groups: list[Any]) -> None:
    """Let go of process groups on a thread of its own; the caller keeps no reference, and may clear the list."""
    kept = list(groups)
    groups.clear()

    threading.Thread(target=kept.clear, name="hydragraph-drop", daemon=True).start()

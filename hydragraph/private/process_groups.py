"""Process groups of torch.distributed: options of NCCL, such as priority, and release without waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Blocks, each on a multiprocessor, of a kernel of traffic that overlaps with computation. NCCL's own maximum is 32.
_BACKGROUND_CTAS = 16


def drop_all() -> None:
    """Forget all process groups, including the default one, without waiting, so that new ones can be made.

    Group names are counted from 0 again: ranks that meet must count alike.
    """
    groups = list(distributed_c10d._world.pg_names)
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0
    drop(groups)


def drop(groups: list[Any]) -> None:
    """Release process groups; the list is cleared.

    gloo's destructor waits for pending operations, which may never end, so a separate thread waits.
    """
    kept = list(groups)
    groups.clear()

    threading.Thread(target=kept.clear, name="hydragraph-drop", daemon=True).start()


@contextmanager
def unbound() -> Iterator[None]:
    """Make groups without the device bound by `init_process_group(device_id=)`."""
    default = dist.group.WORLD
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def nccl_options(timeout: timedelta, urgent: bool) -> Any:
    """Return options for a group's NCCL communicators; None if PyTorch is built without NCCL.

    Args:
        urgent: whether computation waits for the traffic, so that its kernels precede others. Other traffic overlaps
            with computation, and leaves most multiprocessors to it.
    """
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timeout
    if not urgent:
        options.config.max_ctas = _BACKGROUND_CTAS
    return options


def abort_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort NCCL's communicators as one NCCL group: consecutive aborts can deadlock (PyTorch issue 119797)."""
    leader = _nccl_of(groups[0]) if groups else None
    if leader is not None:
        leader._group_start()
    try:
        for group in groups:
            group.abort()
    finally:
        if leader is not None:
            leader._group_end()


def _nccl_of(group: dist.ProcessGroup) -> Any:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if hasattr(backend, "_group_start") else None

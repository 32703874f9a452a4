"""Process groups: NCCL options, release without waiting, and NVLink."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Maximum multiprocessors for background traffic; NCCL's maximum is 32.
_BACKGROUND_CTAS = 16


def drop_all() -> None:
    """Release all process groups without waiting; name new groups from 0 again, so that ranks use equal names."""
    # Hold references: the destructors must run in the thread of `drop`.
    groups = list(distributed_c10d._world.pg_names)
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0
    drop(groups)


def drop(groups: list[Any]) -> None:
    """Clear the list, and release its groups in a thread, because gloo's destructor blocks."""
    kept = list(groups)
    groups.clear()

    threading.Thread(target=kept.clear, name="hydragraph-drop", daemon=True).start()


@contextmanager
def unbound() -> Iterator[None]:
    """In this context, create groups without binding them to the device of `init_process_group(device_id=)`."""
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
    """Return options for NCCL communicators, if PyTorch has NCCL; computation waits for `urgent` traffic."""
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timeout
    if not urgent:
        options.config.max_ctas = _BACKGROUND_CTAS
    return options


def abort_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort communicators as one NCCL group; separate aborts can deadlock (PyTorch issue 119797)."""
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


def nvlink_peers(gpu: int) -> set[int]:
    """Return the numbers of the GPUs that NVLink connects to a GPU; empty if unknown."""
    try:
        found = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink")
    except (AttributeError, RuntimeError):
        return set()
    return {other for other, links in enumerate(found.matrix[gpu]) if links and other != gpu}

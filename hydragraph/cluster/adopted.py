"""The existing process group, and one that sends Python objects."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from hydragraph.private.process_groups import unbound


def check_moves(default: dist.ProcessGroup) -> None:
    if "fake" in dist.get_backend(default):
        raise ValueError(
            "the default process group has the backend 'fake', whose operations transfer no data: call "
            "init_process_group with gloo or nccl, or omit this call and start ranks with torchrun or hydragraph.launch"
        )


@lru_cache(maxsize=1)
def object_group(default: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return a group that sends objects, or None if the default group can (collective call)."""
    if any(device.type == "cpu" for device in default._device_types):
        return None
    if not dist.is_gloo_available():
        raise ValueError(
            f"the default process group (backend {dist.get_backend(default)!r}) cannot send CPU tensors, and "
            "this PyTorch has no gloo: call init_process_group with a backend for CPU tensors as well"
        )
    with unbound():
        group: dist.ProcessGroup = dist.new_group(backend="gloo", group_desc="hydragraph-objects")
        return group


def backend_of(devices: list[str | None]) -> str:
    """Return "nccl" if every rank has its own GPU, as NCCL requires, else "gloo"."""
    return "nccl" if None not in devices and len(set(devices)) == len(devices) else "gloo"


def gpu_name(device: torch.device) -> str | None:
    """Return the UUID of a rank's GPU if NCCL can use it, else None."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)

"""The default process group, made by the user or by `join`, and the group for objects beside it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hydragraph.private.process_groups import unbound


class _Objects:
    """The group for objects that was made for a default group."""

    default: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None


def check_moves(default: dist.ProcessGroup) -> None:
    """Refuse a default group whose operations move nothing.

    Raises:
        ValueError: it is PyTorch's fake one.
    """
    if "fake" in dist.get_backend(default):
        raise ValueError(
            "the default process group has the backend 'fake', whose operations move nothing between ranks: call "
            "init_process_group with gloo or nccl, or leave it out and start ranks with torchrun or hydragraph.launch"
        )


def object_group(default: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return the group in which objects travel between the ranks of a default group; None: the default group itself.

    Objects travel as CPU tensors, which a group without a backend for the CPU cannot move, as one that
    `init_process_group("nccl")` has made: gloo then moves them in a group of its own. All ranks call this together.

    Raises:
        ValueError: the default group moves no CPU tensors, and this PyTorch has no gloo.
    """
    if moves_cpu_tensors(default):
        return None
    if _Objects.default is not default:
        if not dist.is_gloo_available():
            raise ValueError(
                f"the default process group (backend {dist.get_backend(default)!r}) moves no CPU tensors, and this "
                "PyTorch has no gloo that would: call init_process_group with a backend for the CPU as well"
            )
        with unbound():
            made = dist.new_group(backend="gloo", group_desc="hydragraph-objects")
        _Objects.default, _Objects.group = default, made
    return _Objects.group


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Say whether a group has a backend for tensors of the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


def backend_of(devices: list[str | None]) -> str:
    """Return the backend for tensors of ranks that compute on these devices.

    Args:
        devices: by rank, the name of a GPU that no other GPU of any machine has; None: a rank has none, or no NCCL.

    NCCL refuses two ranks on one GPU, and it may be shared by chance: two that survive the loss of others keep theirs.
    """
    return "nccl" if None not in devices and len(set(devices)) == len(devices) else "gloo"


def gpu_name(device: torch.device) -> str | None:
    """Return the unique name of a rank's GPU if NCCL can use it, else None."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)

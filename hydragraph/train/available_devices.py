"""Devices to train on."""

from __future__ import annotations

import os
from dataclasses import dataclass


class RanksIfEqual(int):
    """Number of ranks if every machine has as many GPUs as this one."""


@dataclass(frozen=True)
class AvailableDevices:
    ranks: int
    cuda: bool
    text: str


def own_gpus(device: str | None = None) -> int:
    import torch

    return 0 if device == "cpu" else torch.cuda.device_count()


def devices_here(device: str | None = None, supervised: bool = True) -> AvailableDevices:
    """Return the launcher's devices, or this machine's devices if there is no launcher.

    Args:
        supervised: whether a launcher's only process per machine starts one rank per GPU.
    """
    gpus = own_gpus(device)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        # One process per machine starts a rank per GPU; machines are assumed equal.
        alone = supervised and os.environ.get("LOCAL_WORLD_SIZE") == "1"
        processes = int(os.environ["WORLD_SIZE"])
        ranks = RanksIfEqual(processes * max(gpus, 1)) if alone else processes
        return AvailableDevices(ranks, gpus > 0, f"{ranks} rank{'s' * (ranks != 1)} of the launcher")
    if gpus:
        return AvailableDevices(gpus, True, f"{gpus} GPU{'s' * (gpus != 1)} of this machine")
    return AvailableDevices(1, False, "1 process, which uses all cores; this machine has no GPU")

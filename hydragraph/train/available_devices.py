"""Devices to train on."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class AvailableDevices:
    """Devices, each with one process; `text` describes them."""

    ranks: int
    cuda: bool
    text: str


def devices_here(device: str | None = None, supervised: bool = True) -> AvailableDevices:
    """Return this machine's devices, times a launcher's machines if their processes start the ranks (`supervised`)."""
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        alone = supervised and os.environ.get("LOCAL_WORLD_SIZE") == "1"
        ranks = int(os.environ["WORLD_SIZE"]) * (max(gpus, 1) if alone else 1)
        return AvailableDevices(ranks, gpus > 0, f"{ranks} rank{'s' * (ranks != 1)} of the launcher")
    if gpus:
        return AvailableDevices(gpus, True, f"{gpus} GPU{'s' * (gpus != 1)} of this machine")
    return AvailableDevices(1, False, "1 process, which uses all cores; this machine has no GPU")

"""Reader of a checkpoint's weights for a single process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from hydragraph.checkpoint.manifest import Damaged, SavedFile, read_manifest
from hydragraph.checkpoint.metadata import Reader
from hydragraph.checkpoint.save_and_load import read_buffers


def read_weights(path: Path) -> dict[str, Tensor]:
    """Check a checkpoint; return its full fp32 weights and persistent buffers by name, on the CPU.

    Raises:
        Damaged: a file differs from what was written.
        ValueError: the checkpoint is missing or incomplete.
    """
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file() or SavedFile.of(file) != expected:
            raise Damaged(f"checkpoint {path}: {name} has changed since it was written: export another checkpoint")
    weights: dict[str, Any] = {name: torch.empty(shape) for name, shape in manifest.parameters.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(weights, storage_reader=Reader(path, manifest.files), no_dist=True)
    return {**weights, **read_buffers(path, manifest)}

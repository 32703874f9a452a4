"""Reader of a checkpoint's weights for one process."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hydragraph.checkpoint.extra_entry import decoded
from hydragraph.checkpoint.manifest import Damaged, damage, read_manifest
from hydragraph.checkpoint.metadata import CheckpointReader
from hydragraph.checkpoint.save_and_load import BUFFERS, ENTRY, read_entries
from hydragraph.runtime.shard_boxes import OwnedBoxes


def read_weights(path: Path) -> dict[str, Tensor]:
    """Check a checkpoint; return its full fp32 weights and persistent buffers by name, on the CPU."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        if (how := damage(path / name, expected)) is not None:
            raise Damaged(f"checkpoint {path}: {how}: export another checkpoint")
    weights = {name: torch.empty(shape) for name, shape in manifest.parameters.items()}
    contents: dict[str, OwnedBoxes | bytes] = {ENTRY: b""}
    for name, weight in weights.items():
        contents[name] = OwnedBoxes(weight.shape, weight.dtype, {torch.Size([0] * weight.dim()): weight})
    read_entries(contents, CheckpointReader(path, manifest.files))
    return {**weights, **decoded(cast(bytes, contents[ENTRY]))["extra"].get(BUFFERS, {})}

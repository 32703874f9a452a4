"""Manifest `complete.json`, which marks a complete checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hydragraph.cluster.agreement import together
from hydragraph.cluster.communicators import Groups

FORMAT = 1
MARKER = "complete.json"
# torch.distributed.checkpoint (DCP) writes its index here
METADATA = ".metadata"


class Damaged(ValueError):  # noqa: N818
    """Error for a checkpoint with missing or changed files."""


@dataclass(frozen=True)
class SavedFile:
    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> SavedFile:
        with path.open("rb") as file:
            return SavedFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of `complete.json`; `optimizer` is the class's name, or None if only weights were saved."""

    format: int
    versions: dict[str, str]
    ranks: int
    parameters: dict[str, tuple[int, ...]]
    optimizer: str | None
    files: dict[str, SavedFile]


def read_manifest(path: Path) -> CheckpointManifest:
    """Read a complete checkpoint's manifest.

    Raises:
        Damaged: the manifest cannot be read.
        ValueError: the manifest is missing, or its format is not supported.
    """
    if not (path / MARKER).is_file():
        aside = [str(p) for p in sorted(path.parent.glob(f"{path.name}.old-*")) if (p / MARKER).is_file()]
        remedy = (
            f"rename {aside[0]}, the checkpoint that a crashed save moved aside, to {path.name}"
            if aside
            else "name a directory that `save` wrote"
        )
        raise ValueError(f"checkpoint {path} has no {MARKER}, so it is incomplete or not a checkpoint: {remedy}")
    try:
        content = json.loads((path / MARKER).read_text())
        version = content["format"]
        if version == FORMAT:
            content["parameters"] = {name: tuple(shape) for name, shape in content["parameters"].items()}
            content["files"] = {_plain(name): SavedFile(**file) for name, file in content["files"].items()}
            if METADATA not in content["files"]:
                raise ValueError(f"{METADATA} is not listed")
            return CheckpointManifest(**content)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise Damaged(f"checkpoint {path}: {MARKER} is damaged ({error}): load an earlier checkpoint") from error
    raise ValueError(
        f"checkpoint {path} has format {version}, but this version of hydragraph reads {FORMAT}: "
        "install a newer version"
    )


def is_whole(path: Path) -> bool:
    try:
        files = read_manifest(path).files
        return all((path / name).stat().st_size == file.bytes for name, file in files.items())
    except (ValueError, OSError):
        return False


def check_files(path: Path, manifest: CheckpointManifest, groups: Groups, what: str, sharing: tuple[int, ...]) -> None:
    """Check the hashes of files, divided among the ranks that share a copy (`sharing`).

    If a hash differs, all ranks raise Damaged.
    """
    mine = sorted(manifest.files)[sharing.index(groups.world.rank) :: len(sharing)]
    by_rank = together(groups, what, lambda: [text for n in mine if (text := damage(path / n, manifest.files[n]))])
    damages = [text for part in by_rank for text in part]
    if damages:
        raise Damaged(f"checkpoint {path}: {'; '.join(damages)}: restore it from a copy, or load an earlier checkpoint")


def check_model(
    where: str,
    parameters: Mapping[str, tuple[int, ...]],
    saved: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    optimizer: str | None,
) -> None:
    """Raise a ValueError unless a checkpoint belongs to this model and optimizer (None: any optimizer)."""
    check_shapes(where, parameters, shapes)
    if optimizer is not None and saved != optimizer:
        raise ValueError(
            f"{where}: saved with {saved or 'no optimizer'}, not {optimizer}: "
            "use the saved run's optimizer, or no optimizer to load only weights"
        )


def check_buffers(where: str, stored: Mapping[str, Tensor] | None, buffers: Mapping[str, Tensor]) -> None:
    # Earlier versions wrote no buffers
    if stored is not None:
        saved, own = ({name: tuple(b.shape) for name, b in each.items()} for each in (stored, buffers))
        check_shapes(where, saved, own)


def check_shapes(where: str, stored: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    different = [
        f"{name} is {list(stored[name]) if name in stored else 'missing'} in the checkpoint and"
        f" {list(shapes[name]) if name in shapes else 'missing'} in the model"
        for name in (*stored, *(n for n in shapes if n not in stored))
        if stored.get(name) != shapes.get(name)
    ]
    if different:
        rest = f"; and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(f"{where}: {'; '.join(different[:3])}{rest}: load it into the model that was saved")


def _plain(name: str) -> str:
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a file of this checkpoint")
    return name


def damage(path: Path, expected: SavedFile) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing (expected {expected.bytes} bytes with SHA-256 {expected.sha256})"
    try:
        actual = SavedFile.of(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if actual.bytes != expected.bytes:
        return f"{path.name} has {actual.bytes} bytes, expected {expected.bytes}"
    if actual.sha256 != expected.sha256:
        return f"{path.name} is corrupt: SHA-256 {actual.sha256}, expected {expected.sha256}"
    return None

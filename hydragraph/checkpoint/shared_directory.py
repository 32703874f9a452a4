"""Checks that all hosts see the same directory."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from hydragraph.checkpoint.manifest import MARKER, CheckpointManifest, read_manifest
from hydragraph.cluster.agreement import together
from hydragraph.cluster.communicators import Groups


def leave_mark(directory: Path) -> Path:
    """Create a file that other ranks look for, under a new name that no host has cached as missing."""
    mark = directory / f".seen-{uuid.uuid4().hex}"
    mark.touch(exist_ok=False)
    return mark


def see(found: Path, what: str, rank: int) -> None:
    if not found.exists():
        raise ValueError(
            f"{what}: rank {rank} on {socket.gethostname()} does not see what rank 0 writes there: name a directory"
            " that all hosts share"
        )


def read_alike(path: Path, groups: Groups, what: str) -> CheckpointManifest:
    """Read a manifest, which must be identical on every host."""
    # If no rank sees the marker, `read_manifest` explains why.
    there = together(groups, what, (path / MARKER).is_file)
    if lacking := [rank for rank, is_there in enumerate(there) if is_there < max(there)]:
        raise ValueError(
            f"checkpoint {path}: ranks {lacking} see no {MARKER} there, but the other ranks do: name a directory that "
            "all hosts share, or copy the checkpoint to every host"
        )
    manifests = together(groups, what, lambda: read_manifest(path))
    if other := [rank for rank, manifest in enumerate(manifests) if manifest != manifests[0]]:
        raise ValueError(
            f"checkpoint {path}: ranks {other} see a different checkpoint there than rank 0: name a directory that all"
            " hosts share, or copy the same checkpoint to every host"
        )
    return manifests[0]


def same_copy(path: Path, groups: Groups, what: str) -> tuple[int, ...]:
    """Return the ranks, ascending, that read the same copy as this rank."""
    seen = together(groups, what, lambda: _identity(path / MARKER))
    return tuple(rank for rank, identity in enumerate(seen) if identity == seen[groups.world.rank])


def _identity(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return os.statvfs(file).f_fsid, status.st_ino, status.st_mtime_ns

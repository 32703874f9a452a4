"""Directories of checkpoints."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hydragraph.checkpoint.manifest import MARKER, CheckpointManifest, SavedFile
from hydragraph.data.atomic_write import write_whole

_LOG = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-(\d+)\.(?:tmp|old)-[0-9a-f]{8}")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(directory: PathLike) -> list[tuple[int, Path]]:
    """List a directory's complete checkpoints `step-N` as (N, path), ascending."""
    folder = Path(directory)
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [(match, path) for path in paths if (match := _STEP.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in named if (path / MARKER).is_file())


def set_aside(path: Path, why: str) -> Path:
    return path.rename(path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}"))


def prune(directory: PathLike, keep: int, spared: int | None = None) -> None:
    """Delete leftovers of crashed saves, and complete checkpoints except the `keep` newest and step `spared`.

    Only one rank may call this, while no other uses the directory.
    """
    if keep < 1:
        raise ValueError(f"prune {directory}: keep={keep}: keep at least one checkpoint")
    directory = Path(directory)
    checkpoints = complete(directory)
    for step, path in checkpoints[:-keep]:
        if step != spared:
            # A partly deleted checkpoint must not look complete
            shutil.rmtree(set_aside(path, "old"))
            _LOG.info("deleted checkpoint %s: only the newest %d are kept", path, keep)
    for path in directory.iterdir() if checkpoints else ():
        # Leftovers of later steps may belong to a save in progress.
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is not None and int(leftover[1]) <= checkpoints[-1][0]:
            shutil.rmtree(path)


def make_scratch(path: Path) -> Path:
    if path.exists() and not (path / MARKER).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"checkpoint {path}: this path exists, but has no {MARKER}, so it is not a checkpoint: choose another "
            "path, or remove this one"
        )
    scratch = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    scratch.mkdir(parents=True)
    return scratch


@contextmanager
def removed_after_error(scratch: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def written_files(scratch: Path, rank: int) -> dict[str, SavedFile]:
    names = [*scratch.glob(f"__{rank}_*"), *([scratch / ".metadata"] if rank == 0 else ())]
    return {path.name: SavedFile.of(path) for path in names}


def commit(path: Path, scratch: Path, manifest: CheckpointManifest) -> None:
    unseen = [name for name in manifest.files if not (scratch / name).is_file()]
    if unseen:
        raise ValueError(
            f"checkpoint {path}: rank 0 does not see {', '.join(unseen)}, which other ranks wrote: save to a directory"
            " that all ranks share"
        )
    # The marker comes after all files, and the new name last. If `path` exists, a crash between
    # the renames leaves the old checkpoint in `PATH.old-...`.
    write_whole(scratch / MARKER, json.dumps(asdict(manifest), indent=1))
    _sync(scratch)
    if path.exists():
        aside = set_aside(path, "old")
        try:
            scratch.rename(path)
        except BaseException:
            aside.rename(path)
            raise
        shutil.rmtree(aside)
    else:
        scratch.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

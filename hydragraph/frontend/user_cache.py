"""Files in the user's cache folder; failed reads and writes are ignored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_LARGEST = 1 << 28
Built = TypeVar("Built")

_LOG = logging.getLogger(__name__)


def folder(kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hydragraph" / kind


def packed_path(kind: str, key: str) -> Path:
    return folder(kind) / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json.z"


def read_packed(path: Path, build: Callable[[bytes], Built]) -> Built | None:
    """Build an object from a file's JSON, or return None; mark the file as used."""
    try:
        packed = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    try:
        return build(zlib.decompressobj().decompress(packed, _LARGEST))
    except (ValueError, zlib.error) as error:
        _LOG.info("ignored the cached file %s: %s", path, error)
        return None


def write_packed(path: Path, data: Callable[[], object], most: int) -> None:
    """Write data atomically if JSON can represent it; keep at most `most` files of this kind."""
    try:
        content = json.dumps(data(), allow_nan=False)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(zlib.compress(content.encode(), 3))
        os.replace(file.name, path)
    except (ValueError, OSError) as error:
        _LOG.info("cannot write %s to the cache: %s", path, error)
        return
    evict(path.parent.name, most)


def evict(kind: str, most: int) -> None:
    files = list(folder(kind).rglob("*"))
    if len(files) <= most:
        return
    used: list[tuple[float, Path]] = []
    for path in files:
        with contextlib.suppress(OSError):
            if path.is_file():
                used.append((path.stat().st_mtime, path))
    # Keep three quarters, so that only every `most / 4`-th write deletes files.
    for _, path in sorted(used)[: len(used) - most * 3 // 4]:
        path.unlink(missing_ok=True)

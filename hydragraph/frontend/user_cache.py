"""Files in the user's cache folder, `$XDG_CACHE_HOME/hydragraph` or `~/.cache/hydragraph`, that spare later runs work.

A file that cannot be read counts as missing, and one that cannot be written is not kept: both only cost time.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

_LOG = logging.getLogger(__name__)


def folder(kind: str) -> Path:
    """Return the path of the folder for one kind of files; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hydragraph" / kind


def read(path: Path) -> bytes | None:
    """Return a file's content and mark it as used now, or return None if it cannot be read."""
    try:
        content = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    return content


def write(path: Path, content: bytes) -> None:
    """Write a file at once, so that no other process reads half of it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        _LOG.info("%s is not kept: %s", path, error)


def evict(kind: str, most: int) -> None:
    """Delete the files used longest ago if there are more than `most`, until three quarters of that number are left."""
    files = list(folder(kind).rglob("*"))
    if len(files) <= most:
        return
    used: list[tuple[float, Path]] = []
    for path in files:
        try:
            if path.is_file():
                used.append((path.stat().st_mtime, path))
        except OSError:
            continue  # another process has deleted it
    for _, path in sorted(used)[: len(used) - most * 3 // 4]:
        path.unlink(missing_ok=True)

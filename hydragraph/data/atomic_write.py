"""Replacement of files: completely or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` at the end of the `with` block, unless an error occurs."""
    # A rename within a directory is atomic.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            # Without fsync, a crash could leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())


def save_figure(figure: Any, path: Path, kind: str = "png") -> None:
    with whole_file(path) as file:
        figure.savefig(file, dpi=120, format=kind)

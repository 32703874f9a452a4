"""Readers of gzip and Zstandard files."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_KINDS = {".gz": "gzip", ".zst": "zstd"}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _KINDS


def suffix_of(path: Path) -> str:
    """Return a file's lower-case suffix, ".jsonl" for "a.jsonl.gz"."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading decompressed bytes.

    Raises:
        ValueError: the file is damaged.
        ImportError: pyarrow, needed for Zstandard, is not installed.
    """
    if not is_compressed(path):
        with path.open("rb") as file:
            yield file
        return
    kind = _KINDS[path.suffix.lower()]
    try:
        with _unpacking(path, kind) as file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: not a readable {kind} file ({error}): compress or download it again") from error


def _unpacking(path: Path, kind: str) -> Any:
    if kind == "gzip":
        return gzip.open(path)
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"{path}: reading .zst needs pyarrow: pip install 'hydragraph[train]'") from error
    # For reading lines
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))

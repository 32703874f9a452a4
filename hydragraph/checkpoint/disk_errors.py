"""What a file system refuses, in its own words: libraries that write for us often say something else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROBE = 4 << 20  # bytes: more than what a full disk may have left after it cut off a file


@contextmanager
def file_errors(directory: Path, shown: Path) -> Iterator[None]:
    """Raise what goes wrong with files inside as an OSError that says what and where.

    PyTorch's writer, written in C++, raises RuntimeError("... inline_container.cc ... unexpected pos") on a full disk.

    Args:
        directory: where files are written; a probe there finds what the writer did not say.
        shown: the path that the user gave, which errors name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk's does not say where
            error.filename = str(shown)
        raise
    except Exception as error:
        cause = refusal(directory)
        if cause is None and "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        number = errno.EIO if cause is None else cause.errno or errno.EIO
        raise OSError(number, os.strerror(number), str(shown)) from error


def refusal(directory: Path) -> OSError | None:
    """Return what writing to a directory raises now; None where it works."""
    path = directory / f".probe.{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error
    try:
        left = _PROBE
        while left:  # the write that meets the end of a disk is only a short one
            left -= os.write(descriptor, bytes(left))
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return None

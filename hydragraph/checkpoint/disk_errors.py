"""Detection of the causes of file system errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Bytes that `refusal` writes; a disk with less free space counts as full
_PROBE = 4 << 20


@contextmanager
def file_errors(directory: Path, shown: Path) -> Iterator[None]:
    """Convert write errors in a `with` block to an OSError with the cause and the path `shown`.

    On a full disk, PyTorch's writer raises RuntimeError("... inline_container.cc ... unexpected pos").
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(shown)
        raise
    except Exception as error:
        cause = refusal(directory)
        if cause is None and "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        number = errno.EIO if cause is None else cause.errno or errno.EIO
        raise OSError(number, os.strerror(number), str(shown)) from error


def refusal(directory: Path) -> OSError | None:
    """Write a test file to a directory; return the error, if any."""
    path = directory / f".probe.{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error
    try:
        left = _PROBE
        # On a full disk, `write` returns a smaller count
        while left:
            left -= os.write(descriptor, bytes(left))
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return None

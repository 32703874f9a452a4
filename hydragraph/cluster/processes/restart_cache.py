"""What the first ranks of a launch have made, for the processes that come later in the places of lost ones.

The launcher of ranks that are replaced names a folder of its user's alone, in which a captured model stays until the
launch ends: a process that takes a lost one's place reads it instead of tracing the model anew beside the training.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hydragraph.cluster.processes.shared_preparation import SharedFile

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

KEPT = "HYDRAGRAPH_KEPT"  # the variable of the environment with that folder's path


def kept(what: str, key: str, make: Callable[[], T]) -> T:
    """Return what the ranks of this launch have made, or where there is nothing of it left make it.

    Args:
        what, key, make: as of `once.once_per_machine`.
    """
    folder = _folder()
    if folder is not None and (folder / key).exists():
        try:
            check_private(folder)
            with (folder / key).open("rb") as file:
                return SharedFile(file.fileno()).read()  # type: ignore[no-any-return]
        except (OSError, ValueError, RuntimeError) as refused:
            _LOG.warning("%s: what the first ranks made cannot be read (%s): making it again", what, refused)
    return make()


def _folder() -> Path | None:
    name = os.environ.get(KEPT)
    return Path(name) if name else None


def keep(value: object, what: str, key: str) -> None:
    """Leave a value for processes that come later, whole or not at all, where there is a folder for it.

    Args:
        value: can be pickled, as what `launch`'s `prepare` returns; where it cannot, it is not kept.
        what: it is, for messages.
        key: what it depends on, and what those that come later ask for.
    """
    folder = _folder()
    if folder is None:
        return
    partial = folder / f".{key}.{os.getpid()}"
    try:
        check_private(folder)
        with partial.open("w+b") as file:
            SharedFile(file.fileno()).write(value)
        partial.replace(folder / key)
    except (OSError, ValueError, RuntimeError) as refused:
        partial.unlink(missing_ok=True)
        _LOG.warning("%s: it cannot be kept for ranks that come later, so each makes its own (%s)", what, refused)


def check_private(folder: Path) -> None:
    """Raise a PermissionError unless a folder is this user's alone."""
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        raise PermissionError(f"{folder} is not a folder of this user alone")

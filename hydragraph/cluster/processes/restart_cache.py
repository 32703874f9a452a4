"""Cache of the first ranks' results for replacement processes: a private folder that exists until the launch ends."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hydragraph.cluster.processes.rank_process import KEPT
from hydragraph.cluster.processes.shared_preparation import read_value, write_value

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def kept(what: str, key: str, make: Callable[[], T]) -> T:
    folder = _folder()
    if folder is not None and (folder / key).exists():
        try:
            check_private(folder)
            value: T = read_value(folder / key)
            return value
        except (OSError, ValueError, RuntimeError) as refused:
            _LOG.warning("%s: the first ranks' result cannot be read (%s): computing it again", what, refused)
    return make()


def _folder() -> Path | None:
    name = os.environ.get(KEPT)
    return Path(name) if name else None


def keep(value: object, what: str, key: str) -> None:
    folder = _folder()
    if folder is None:
        return
    partial = folder / f".{key}.{os.getpid()}"
    try:
        check_private(folder)
        write_value(partial, value)
        partial.replace(folder / key)
    except (OSError, ValueError, RuntimeError) as refused:
        partial.unlink(missing_ok=True)
        _LOG.warning("%s: the result cannot be cached (%s), so ranks that join later compute their own", what, refused)


def check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
        raise PermissionError(f"{folder} is not private to this user (mode 700)")

"""Kernel statistics of a thread: how long it ran, and how long it waited for its core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

_PATH = "/proc/thread-self/schedstat"  # nanoseconds run, nanoseconds queued, and number of time slices


class Scheduled:
    """Reader of the calling thread's times."""

    def __init__(self) -> None:
        self._thread = 0
        self._file = -1

    def __call__(self) -> tuple[float, float]:
        """Return the total seconds run and queued, or zeros if the system does not report them."""
        if threading.get_ident() != self._thread:
            self._open()
        if self._file < 0:
            return 0.0, 0.0
        ran, queued, _ = os.pread(self._file, 64, 0).split()
        return int(ran) / 1e9, int(queued) / 1e9

    def _open(self) -> None:
        self.__del__()
        self._thread = threading.get_ident()
        with suppress(OSError):
            self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be gone
        if self._file >= 0:
            close(self._file)
            self._file = -1


def unknown() -> tuple[float, float]:
    """Return zeros, because a GPU does not report these times."""
    return 0.0, 0.0

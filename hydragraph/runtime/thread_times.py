"""A thread's seconds running and waiting for its core, without stops by CPU quotas."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from hydragraph.runtime.control_groups import throttled_seconds

# Nanoseconds run, nanoseconds queued, and number of time slices
_PATH = "/proc/thread-self/schedstat"
_NOTED_S = 1e-3


class ThreadTimes:
    """Reader of the calling thread's times."""

    def __init__(self) -> None:
        self._thread = 0
        self._file = -1
        self._queued = 0.0
        self._throttled = 0.0
        self._others = 0.0

    def __call__(self) -> tuple[float, float]:
        """Return total seconds running and queued, or zeros if unknown."""
        if threading.get_ident() != self._thread:
            self._open()
        if self._file < 0:
            return 0.0, 0.0
        ran, queued = self._read()
        waited = queued - self._queued
        self._queued = queued
        # The kernel counts stops by CPU quotas as waits. Reading their times is slow,
        # so do it only after noticeable waits.
        if waited > _NOTED_S:
            throttled = throttled_seconds()
            waited = max(0.0, waited - (throttled - self._throttled))
            self._throttled = throttled
        self._others += waited
        return ran, self._others

    def _open(self) -> None:
        self.__del__()
        self._thread = threading.get_ident()
        with suppress(OSError):
            self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
            _, self._queued = self._read()
            self._throttled = throttled_seconds()

    def _read(self) -> tuple[float, float]:
        ran, queued, _ = os.pread(self._file, 64, 0).split()
        return int(ran) / 1e9, int(queued) / 1e9

    # At interpreter exit, the module `os` may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._file >= 0:
            close(self._file)
            self._file = -1


def unknown() -> tuple[float, float]:
    """Return zeros, because GPUs do not report thread times."""
    return 0.0, 0.0

"""Stack dumps of a rank's threads on stderr, by a signal handler in C that needs no interpreter lock."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

# Unlikely to be used by other code
_ASK = getattr(signal, "SIGRTMIN", 0) + 9
_STDERR = 2


def answer() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(_ASK, file=_STDERR, all_threads=True)


def ask(pid: int, who: str) -> None:
    """Write a line that names another process, which then writes its stacks."""
    _say(who)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.kill(pid, _ASK)


def write(who: str) -> None:
    _say(who)
    faulthandler.dump_traceback(_STDERR)


def _say(who: str) -> None:
    os.write(_STDERR, f"hydragraph: stacks of {who}:\n".encode())

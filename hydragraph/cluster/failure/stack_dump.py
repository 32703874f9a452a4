"""Stack dumps of a rank's threads on stderr, written by a signal handler in C without the interpreter lock."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

# Other code is unlikely to use this signal
_ASK = getattr(signal, "SIGRTMIN", 0) + 9
_STDERR = 2


def answer() -> None:
    """Make this process write its stacks when another process calls `ask`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(_ASK, file=_STDERR, all_threads=True)


def ask(pid: int, who: str) -> None:
    """Write a line that names another process, and make that process write its stacks."""
    _say(who)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.kill(pid, _ASK)


def write(who: str) -> None:
    _say(who)
    faulthandler.dump_traceback(_STDERR)


def _say(who: str) -> None:
    os.write(_STDERR, f"hydragraph: stacks of {who}:\n".encode())

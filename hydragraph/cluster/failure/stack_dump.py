"""What every thread of a rank is doing, on stderr: for a run in which nobody moves on.

It is written by C code that needs no interpreter, so that a rank that never lets go of its own can be asked too: by a
signal, which another rank of its machine sends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

_ASK = getattr(signal, "SIGRTMIN", 0) + 9  # one that nobody else is likely to use
_STDERR = 2


def answer() -> None:
    """Let this process answer to `ask`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(_ASK, file=_STDERR, all_threads=True)


def ask(pid: int, who: str) -> None:
    """Have another process write its stacks, below a line that says whose they are."""
    _say(who)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.kill(pid, _ASK)


def write(who: str) -> None:
    """Write this process's stacks, below a line that says whose they are."""
    _say(who)
    faulthandler.dump_traceback(_STDERR)


def _say(who: str) -> None:
    os.write(_STDERR, f"hydragraph: what {who} is doing:\n".encode())

"""Stop a process for a part of every 100 ms, until SIGTERM: `python benchmarks/throttle.py PID RATE FILE`.

It gets 1 / RATE of its time. It imports little, so that it begins at once. Into FILE goes the rate that the process was
really slowed by: this one may wake too late, and a process that waits for a core stops only once it gets one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PERIOD_S = 0.1


def throttle(pid: int, rate: float, told: Path) -> None:
    """Stop a process for a part of every period until SIGTERM; write down what part it was."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # it sleeps nearly always, and is only exact if it wakes in time
    stopped = 0.0
    began = time.perf_counter()
    phase = began
    try:
        print("begun", flush=True)
        while not ended:
            os.kill(pid, signal.SIGSTOP)
            until = phase + PERIOD_S * (1 - 1 / rate)
            while not _is_stopped(pid) and time.perf_counter() < until:
                time.sleep(0.0002)
            since = time.perf_counter()
            _sleep_until(until)
            os.kill(pid, signal.SIGCONT)
            stopped += time.perf_counter() - since
            phase += PERIOD_S
            _sleep_until(phase)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    told.write_text(str(1 / (1 - stopped / (time.perf_counter() - began))))


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


if __name__ == "__main__":
    throttle(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))

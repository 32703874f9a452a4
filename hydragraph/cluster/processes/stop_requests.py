"""Stop requests by SIGTERM or Ctrl-C, which let a process finish its current work.

- A process without a launcher, or under torchrun, records the first request, and ends itself after the grace period or
  at a second Ctrl-C.
- A launcher forwards the first request to its ranks as SIGTERM, and kills them after the grace period or at a second
  Ctrl-C.
- A rank of a launcher only records the first request.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Fraction of the grace period in which processes must end
_RESERVED = 0.1
_RESERVED_AT_MOST_S = 2.0
# Shows the cursor after a progress bar
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(BaseException):
    """Raised if a signal arrives before any work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Overdue(BaseException):
    """Raised if work exceeds the grace period."""


class StoppableProcess(Protocol):
    def terminate(self) -> None: ...


class Requests(Protocol):
    @property
    def signal(self) -> int:
        """First signal received, or 0."""

    def working(self) -> AbstractContextManager[None]:
        """Only record requests in this context."""


def handling(handlers: Mapping[int, Callable[[int, Any], None]]) -> ExitStack:
    """Set signal handlers until the returned context ends; outside the main thread, do nothing."""
    before = ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            before.callback(signal.signal, number, signal.signal(number, handler))
    return before


class Relay:
    def __init__(self) -> None:
        self._processes: Sequence[StoppableProcess] = ()

    @contextmanager
    def to(self, processes: Sequence[StoppableProcess]) -> Iterator[None]:
        self._processes = processes
        try:
            yield
        finally:
            self._processes = ()

    def tell(self) -> bool:
        for process in self._processes:
            process.terminate()
        return bool(self._processes)


class Stopping:
    """Context manager that handles stop requests; outside the main thread it has no effect.

    Args:
        grace_s: seconds within which the process ends after a request.
        relay: a launcher's processes, or None if this process does the work.
        led: whether this process is a rank of a launcher.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        relay: Relay | None = None,
        led: bool = False,
        overdue: Callable[[], str] = lambda: "it was ended",
    ) -> None:
        self.signal = 0
        self._grace_s = grace_s
        self._work_s = grace_s - min(_RESERVED * grace_s, _RESERVED_AT_MOST_S)
        self._relay = relay
        self._led = led
        self._overdue = overdue
        self._before = ExitStack()
        self._in_hand = False
        self._interrupts = 0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Stopping:
        # Keep ignored signals (nohup) ignored.
        heard = [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        handlers: dict[int, Any] = dict.fromkeys(heard, self._heard)
        if self._relay is not None:
            handlers[signal.SIGALRM] = self._late
        self._before = handling(handlers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._relay is not None and self.signal:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._before.close()

    @contextmanager
    def working(self) -> Iterator[None]:
        self._in_hand = True
        try:
            yield
        finally:
            self._in_hand = False

    def _heard(self, number: int, _: object) -> None:
        # A second Ctrl-C ends the process at once, unlike a repeated SIGTERM.
        self._interrupts += number == signal.SIGINT
        if self.signal:
            if self._interrupts > 1 and not self._led:
                self._at_once()
            return
        self.signal = number
        if not (self._in_hand if self._relay is None else self._relay.tell()):
            raise Interrupted(number)
        if self._led:
            return
        if int(os.environ.get("RANK", "0")) == 0:
            _say(f"stopping after this step, within {self._grace_s:g} s; press Ctrl-C again to end at once")
        if self._relay is not None:
            signal.setitimer(signal.ITIMER_REAL, self._work_s)
            return
        # On a thread, because a signal handler may not run while the main thread waits.
        self._timer = threading.Timer(self._work_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _at_once(self) -> None:
        if self._relay is not None:
            raise KeyboardInterrupt
        _say("stopped at once")
        os._exit(128 + signal.SIGINT)

    def _late(self, _: int, __: object) -> None:
        raise Overdue

    def _end(self) -> None:
        _say(self._overdue())
        os._exit(1)


def _say(sentence: str) -> None:
    """Write a sentence without `print`, which the signal may have interrupted."""
    shown = _SHOW_CURSOR if sys.stderr.isatty() else ""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{shown}hydragraph: {sentence}\n".encode())

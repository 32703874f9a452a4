"""Waiting for communication that may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue

from hydragraph.runtime.message import Work


class Waiter:
    """Waits for works on a thread of its own, so that a wait can be left behind.

    Args:
        interval: how often to ask whether a wait is abandoned.
    """

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval
        self._requests: SimpleQueue[tuple[Work, SimpleQueue[Exception | None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="hydragraph-waiter", daemon=True).start()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            work, answer = request
            try:
                work.wait()
                answer.put(None)
            except Exception as error:
                answer.put(error)
            del request, work, answer  # a buffer must not live until the next wait

    def wait(self, work: Work, abandoned: Callable[[], bool]) -> None:
        """Waits until the work is done or `abandoned()`; raises the work's error, or RuntimeError."""
        answer: SimpleQueue[Exception | None] = SimpleQueue()
        self._requests.put((work, answer))
        while True:
            try:
                error = answer.get(timeout=self._interval.total_seconds())
            except Empty:
                if abandoned():
                    raise RuntimeError("communication was ended, but one operation did not end with it") from None
                continue
            if error is not None:
                raise error
            return

    def close(self) -> None:
        """Ends the thread, once it waits for nothing."""
        self._requests.put(None)

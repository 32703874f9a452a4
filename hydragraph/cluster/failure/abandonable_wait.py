"""Waits that the caller can abandon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")
_Request = tuple[Callable[[], Any], "SimpleQueue[tuple[Any, BaseException | None]]"]


class Waiter:
    """Runner of one caller's blocking functions on another thread."""

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            function, answer = request
            try:
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))
            del request, function, answer

    def run(self, function: Callable[[], T], abandoned: Callable[[], bool]) -> T:
        """Return the function's result or raise its error; raise a RuntimeError once `abandoned()` is true."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hydragraph-waiter", daemon=True)
            self._thread.start()
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._requests.put((function, answer))
        while True:
            try:
                value, error = answer.get(timeout=self._interval.total_seconds())
            except Empty:
                if abandoned():
                    raise RuntimeError("communication was shut down, but one operation did not end") from None
                continue
            if error is not None:
                raise error
            return cast(T, value)

    def close(self) -> None:
        self._requests.put(None)

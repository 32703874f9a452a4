"""Requests to a store that may not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class StoreUnavailable(Exception):  # noqa: N818 reads as a sentence
    """The store did not answer in time, or is gone."""


class StorePoller:
    """Thread that repeats a request to the store, and runs other requests in between.

    Args:
        question: the repeated request; any error except OSError means that the store is gone.

    Attributes:
        silent_s: seconds since the last answer.
        gone: whether the store's process has closed the connection.
    """

    def __init__(self, question: Callable[[], None], interval: timedelta) -> None:
        self._question = question
        self._interval = interval.total_seconds()
        self._others: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._stopped = threading.Event()
        self.silent_s = 0.0
        self.gone = False
        self._thread = threading.Thread(target=self._run, name="hydragraph-asker", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[], T], patience: timedelta) -> T:
        """Make another request. Return its answer or raise its OSError; raise StoreUnavailable if no answer arrives."""
        answer: Future[T] = Future()
        self._others.put((question, answer))
        try:
            return answer.result(0.0 if self.gone else patience.total_seconds())
        except TimeoutError:
            raise StoreUnavailable from None

    def close(self) -> bool:
        """Stop the thread; return False if it still waits for the store."""
        self._stopped.set()
        self._others.put(None)
        self._thread.join(1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                other = self._others.get(timeout=self._interval)
            except Empty:
                other = None
            if self._stopped.is_set():
                return
            try:
                if other is not None:
                    other[1].set_result(other[0]())
                else:
                    self._question()
                self.silent_s = 0.0
            except OSError as error:
                if other is not None:
                    other[1].set_exception(error)
            except Exception:
                # The store's error, whose type depends on PyTorch's version
                self.gone = True
                if other is not None:
                    other[1].set_exception(StoreUnavailable())
                # Later requests fail at once instead of waiting for their time
                # limit, until `close` sends None.
                while (late := self._others.get()) is not None:
                    late[1].set_exception(StoreUnavailable())
                return

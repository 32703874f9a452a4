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
    """Thread that repeats a request to the store, and runs others in between.

    Args:
        question: the repeated request; errors except OSError mean that the store is gone.

    Attributes:
        silent_s: seconds since the last answer.
        gone: whether the store has closed the connection.
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
        """Return another request's answer or raise its OSError; without an answer, raise StoreUnavailable."""
        answer: Future[T] = Future()
        self._others.put((question, answer))
        try:
            return answer.result(0.0 if self.gone else patience.total_seconds())
        except TimeoutError:
            raise StoreUnavailable from None

    def close(self) -> bool:
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
                # The error's type depends on PyTorch's version
                self.gone = True
                if other is not None:
                    other[1].set_exception(StoreUnavailable())
                # Until `close` sends None, later requests fail at once, not at their
                # time limit.
                while (late := self._others.get()) is not None:
                    late[1].set_exception(StoreUnavailable())
                return

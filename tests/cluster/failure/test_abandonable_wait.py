"""A wait ends with its work, with the work's error, or by being left behind."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from hydragraph.cluster.failure.abandonable_wait import Waiter


class Work:
    """Stands for an operation of gloo's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.done = error, threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


def finished(error: Exception | None = None) -> Any:
    work = Work(error)
    work.done.set()
    return work


@pytest.fixture
def waiter() -> Any:
    made = Waiter(timedelta(milliseconds=1))
    yield made
    made.close()


def test_a_wait_ends_with_its_work(waiter: Waiter) -> None:
    assert waiter.run(lambda: 42, lambda: False) == 42
    for _ in range(3):
        waiter.run(finished().wait, lambda: False)
    with pytest.raises(RuntimeError, match=r"^connection reset$"):
        waiter.run(finished(RuntimeError("connection reset")).wait, lambda: False)
    waiter.run(finished().wait, lambda: False)


def test_a_wait_goes_on_until_it_is_abandoned(waiter: Waiter) -> None:
    work: Any = Work()
    answers = iter([False, False, True])
    with pytest.raises(RuntimeError, match="one operation did not end"):
        waiter.run(work.wait, lambda: next(answers))
    assert next(answers, None) is None, "it was asked three times"
    work.done.set()
    waiter.run(finished().wait, lambda: False)  # the thread is free again, and the late answer is discarded

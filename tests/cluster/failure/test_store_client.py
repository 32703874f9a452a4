"""Clients do not wait for a store that does not answer or has gone."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from hydragraph.cluster.failure.store_client import StorePoller, StoreUnavailable

SOON, LONG = timedelta(milliseconds=5), timedelta(seconds=30)


def test_it_asks_again_and_again_and_others_in_between() -> None:
    asked = threading.Semaphore(0)
    asker = StorePoller(asked.release, SOON)
    asker.silent_s = 5.0
    for _ in range(3):
        assert asked.acquire(timeout=30)
    assert asker.silent_s == 0.0
    assert asker.ask(lambda: 42, LONG) == 42

    def refuse() -> None:
        raise FileNotFoundError("board")

    with pytest.raises(FileNotFoundError, match="board"):
        asker.ask(refuse, LONG)
    assert asker.ask(lambda: "still there", LONG) == "still there"
    assert not asker.gone
    assert asker.close()


def test_who_asks_a_silent_store_is_left_waiting_for_no_longer_than_it_wants() -> None:
    answer = threading.Event()
    asker = StorePoller(lambda: None, SOON)
    with pytest.raises(StoreUnavailable):
        asker.ask(answer.wait, timedelta(milliseconds=20))
    assert not asker.close(), "its thread waits for the answer"
    answer.set()


def test_a_store_that_is_gone_is_asked_no_more() -> None:
    asked: list[int] = []

    def question() -> None:
        asked.append(1)
        raise RuntimeError("Connection reset by peer")

    asker = StorePoller(question, SOON)
    for _ in range(2000):
        if asker.gone:
            break
        time.sleep(0.005)
    with pytest.raises(StoreUnavailable):
        asker.ask(lambda: 1, LONG)
    assert asked == [1]
    assert asker.close()

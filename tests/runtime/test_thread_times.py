"""Seconds that a thread ran: they grow with its work, and each thread has its own."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hydragraph.runtime import thread_times
from hydragraph.runtime.thread_times import ThreadTimes, unknown


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says it on Linux only")
def test_a_thread_is_told_its_own_time() -> None:
    scheduled = ThreadTimes()
    before = scheduled()
    began = time.thread_time()
    sum(i for i in range(300_000))
    took = time.thread_time() - began
    assert scheduled()[0] - before[0] == pytest.approx(took, rel=0.5, abs=0.005)
    asleep: list[float] = []

    def sleep() -> None:
        first = scheduled()[0]
        time.sleep(0.05)
        asleep.append(scheduled()[0] - first)

    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join()
    assert asleep[0] < 0.04


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says it on Linux only")
def test_stops_by_a_quota_are_no_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts both together, for the thread and for its control group in seconds."""
    waits = iter([5.0, 5.3, 5.4, 5.41, 5.51])
    stops = iter([2.0, 2.2, 2.4, 2.4])
    monkeypatch.setattr(ThreadTimes, "_read", lambda self: (1.0, next(waits)))
    monkeypatch.setattr(thread_times, "throttled_seconds", lambda: next(stops))
    monkeypatch.setattr(thread_times, "_NOTED_S", 0.05)
    scheduled = ThreadTimes()
    assert [scheduled()[1] for _ in range(4)] == pytest.approx([0.1, 0.1, 0.11, 0.21])


def test_nothing_is_known_of_a_gpus_work() -> None:
    assert unknown() == (0.0, 0.0)

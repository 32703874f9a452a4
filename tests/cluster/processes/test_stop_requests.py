"""Signals as each role answers them: a process that works, a launcher, and a launcher's rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hydragraph.cluster.processes.stop_requests import Interrupted, Overdue, Relay, Stopping


class Told:
    """A process that remembers how often it was asked to end."""

    def __init__(self) -> None:
        self.times = 0

    def terminate(self) -> None:
        self.times += 1


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Signals are handled afterwards as before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_work_in_hand_the_first_signal_ends(number: signal.Signals) -> None:
    with pytest.raises(Interrupted) as caught, Stopping(30):
        signal.raise_signal(number)
    assert caught.value.signal == number


def test_work_in_hand_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping(30) as stopping, stopping.working():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the first Ctrl-C
        assert stopping.signal == signal.SIGTERM
    said = "hydragraph: stopping after this step, within 30 s; press Ctrl-C again to end at once\n"
    assert capfd.readouterr().err == said
    assert not [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ]


def test_a_launcher_passes_the_first_on_and_ends_at_the_second_interrupt() -> None:
    relay, told = Relay(), Told()
    with Stopping(30, relay=relay) as stopping:
        with relay.to([told]):
            signal.raise_signal(signal.SIGINT)
            assert (told.times, stopping.signal) == (1, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert told.times == 1


def test_a_launcher_without_ranks_ends() -> None:
    with pytest.raises(Interrupted), Stopping(30, relay=Relay()):
        signal.raise_signal(signal.SIGTERM)


def test_a_launcher_waits_no_longer_than_the_grace() -> None:
    relay = Relay()
    with Stopping(0.2, relay=relay), relay.to([Told()]):
        signal.raise_signal(signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(Overdue):
            time.sleep(30)
    assert time.monotonic() - began < 10


def test_a_rank_leaves_the_rest_to_its_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping(0.1, led=True) as stopping, stopping.working():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
        time.sleep(0.2)
        assert stopping.signal == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_signals_that_are_to_be_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping(30) as stopping:
            signal.raise_signal(signal.SIGINT)
            assert stopping.signal == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_listened_to() -> None:
    found: list[object] = []

    def use() -> None:
        with Stopping(30):
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [before]


ALONE = """
import signal, sys, time
from hydragraph.cluster.processes.stop_requests import Stopping
with Stopping(float(sys.argv[1]), overdue=lambda: "too long") as stopping, stopping.working():
    for number in sys.argv[2:]:
        signal.raise_signal(int(number))
    time.sleep(30)
"""


@pytest.mark.parametrize(
    ("grace", "numbers", "code", "said"),
    [("0.1", [15], 1, "too long"), ("30", [2, 2], 130, "stopped at once"), ("30", [15, 2, 2], 130, "stopped at once")],
)
def test_a_process_by_itself_ends_whatever_it_is_doing(grace: str, numbers: list[int], code: int, said: str) -> None:
    began = time.monotonic()
    arguments = [sys.executable, "-c", ALONE, grace, *map(str, numbers)]
    ran = subprocess.run(arguments, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (code, f"hydragraph: {said}")
    assert time.monotonic() - began < 15

"""The state of real processes: running, stopped, ended, and a number that is used again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess, machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process does")


def eventually(process: WatchedProcess, state: ProcessState) -> bool:
    for _ in range(500):
        if process.state() is state:
            return True
        time.sleep(0.01)
    return False


def test_a_process_runs_is_stopped_goes_on_and_ends() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = WatchedProcess.of(child.pid)
    assert process.state() is ProcessState.RUNNING
    child.send_signal(signal.SIGSTOP)
    assert eventually(process, ProcessState.STOPPED)
    child.send_signal(signal.SIGCONT)
    assert eventually(process, ProcessState.RUNNING)
    child.kill()
    assert eventually(process, ProcessState.ENDED), "a zombie has ended"
    child.wait()
    assert process.state() is ProcessState.ENDED


def test_a_process_that_is_stopped_again_and_again_counts_up_although_it_only_waits() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = WatchedProcess.of(child.pid)
    counts = []
    try:
        for _ in range(3):
            child.send_signal(signal.SIGSTOP)
            assert eventually(process, ProcessState.STOPPED)
            counts.append(process.look()[1])
            time.sleep(0.02)
            assert process.look()[1] == counts[-1], "it stays stopped"
            child.send_signal(signal.SIGCONT)
            assert eventually(process, ProcessState.RUNNING)
        assert counts == sorted(set(counts))
    finally:
        child.kill()
        child.wait()
    assert process.look()[1] == 0


def test_another_process_with_the_same_number_is_another() -> None:
    own = WatchedProcess.own()
    assert own.pid == os.getpid()
    assert own.state() is ProcessState.RUNNING
    assert WatchedProcess(own.pid, own.started - 1).state() is ProcessState.ENDED
    assert WatchedProcess(own.pid).state() is ProcessState.RUNNING  # when it began is not known


def test_a_machine_is_named_alike_by_its_processes() -> None:
    code = "from hydragraph.cluster.failure.process_liveness import machine; print(machine())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine()

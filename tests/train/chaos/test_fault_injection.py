"""Targets and effects of strikes, on processes that stand in for those of a run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydragraph.train.chaos import fault_injection
from hydragraph.train.chaos.fault_injection import ACTIONS, Victim, ended, least_ranks, lives, send
from hydragraph.train.run_folder import RunFolder

# A launcher, what it starts ranks from, and three ranks.
PROCESSES = "sh -c 'sleep 60 & sleep 60 & sleep 60 & wait; true' & wait; true"
CHANCE = random.Random(0)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    launcher = subprocess.Popen(["sh", "-c", PROCESSES])
    run = Victim(RunFolder(tmp_path), launcher)
    assert run.until(lambda: len(run.children()) == 3, 10)
    run.folder.ranks.write_text(json.dumps([{"rank": n, "pid": pid} for n, pid in enumerate(run.children())]))
    yield run
    for pid in [*run.pids, launcher.pid]:
        send(pid, signal.SIGKILL)
    launcher.wait()


def test_every_kind_does_something_and_leaves_somebody() -> None:
    assert all(action.__doc__ for action in ACTIONS.values())
    assert {kind: least_ranks(kind) for kind in ACTIONS if least_ranks(kind) > 2} == {"two": 3}


def test_ranks_are_found_below_whatever_has_started_them(victim: Victim) -> None:
    assert victim.ranks() == victim.children()
    assert victim.supervisor == victim.launcher.pid
    deeper = Victim(victim.folder, victim.launcher, depth=2)
    assert deeper.children() == []
    assert deeper.supervisor not in (victim.launcher.pid, *victim.ranks())
    assert victim.pids == set(victim.ranks())


def test_how_far_a_run_is(victim: Victim) -> None:
    assert (victim.step(), victim.saving(), victim.happened("join")) == (0, False, [])
    victim.folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    victim.folder.place(2).mkdir(parents=True)
    assert (victim.step(), victim.saving()) == (2, True)
    (victim.folder.place(2) / "complete.json").touch()
    assert not victim.saving()


def test_two_are_killed_and_then_the_first(victim: Victim) -> None:
    one, two, three = victim.ranks()
    ACTIONS["two"](victim, two, CHANCE)
    assert [lives(pid) for pid in (one, two, three)].count(True) == 1
    assert not lives(two)
    ACTIONS["first"](victim, two, CHANCE)
    assert victim.ranks() == []
    assert not victim.problems


def test_a_rank_that_is_stopped_and_not_given_up_is_a_problem(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, _ = victim.ranks()
    threading.Timer(0.2, send, (one, signal.SIGKILL)).start()  # as the others do
    ACTIONS["stop"](victim, one, CHANCE)
    assert not victim.problems
    monkeypatch.setattr(fault_injection, "GIVEN_UP_S", 0.1)
    ACTIONS["stop"](victim, two, CHANCE)
    assert victim.problems == ["the other ranks did not end a stopped rank within 0.1 s"]
    assert lives(two)
    assert not ended(two, 0.0)


def test_a_strike_waits_for_a_checkpoint(victim: Victim) -> None:
    began = time.monotonic()
    threading.Timer(0.3, victim.folder.place(3).mkdir, (0o777, True)).start()
    ACTIONS["checkpoint"](victim, victim.ranks()[0], CHANCE)
    assert time.monotonic() - began > 0.25
    assert len(victim.ranks()) == 2

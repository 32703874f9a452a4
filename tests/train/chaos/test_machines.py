"""Simulated machines are lost whole, with their disks, and others come in their places."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.chaos import machines
from hydragraph.train.chaos.machines import Machines, with_disks
from hydragraph.train.config import TrainConfig
from tests.thorough import thorough
from tests.train.plain import settings

FAMILY = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('there', flush=True); time.sleep(60)"
POLITE = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit()); print('there', flush=True); time.sleep(60)"
)


def started(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    return process


def two(folder: Path, code: str) -> Machines:
    """Return two machines with processes that stand in for supervisors and ranks."""
    both = Machines(2, folder / "config.yaml", folder / "run", folder / "disks")
    both.supervisors = [started(POLITE), started(code)]
    both.sessions = {each.pid for each in both.supervisors}
    for number in range(2):
        (folder / "disks" / str(number)).mkdir(parents=True)
    return both


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("code", "notice"), [(FAMILY, False), (POLITE, True)])
def test_a_machine_is_lost_with_its_disk(code: str, notice: bool, tmp_path: Path) -> None:
    both = two(tmp_path, code)
    try:
        assert len(both.processes(1)) == (2 if code == FAMILY else 1)
        began = time.monotonic()
        both.preempt(1, notice)
        assert time.monotonic() - began < machines.NOTICE_S, "one that ends by itself is not waited for"
        assert both.processes(1) == []
        assert both.left() == both.processes(0) == [both.supervisors[0].pid]
        assert [path.name for path in (tmp_path / "disks").iterdir()] == ["0"]
    finally:
        both.end()
    assert both.left() == []


@thorough
def test_machines_are_started_with_their_places(tmp_path: Path) -> None:
    both = Machines(2, tmp_path / "missing.yaml", tmp_path / "run", tmp_path / "disks")
    first = both.start()
    try:
        assert first is both.supervisors[0]
        assert [each.wait(120) for each in both.supervisors] == [2, 2]
        both.replace(1)
        assert both.supervisors[1].wait(120) == 2
    finally:
        both.end()
    assert (tmp_path / "run.log").read_text().count("missing.yaml") == 1
    assert (tmp_path / "run.1.log").read_text().count("missing.yaml") == 2
    assert len(both.sessions) == 3


def test_local_pieces_lie_on_each_machines_disk(tmp_path: Path) -> None:
    plain = from_record(TrainConfig, settings(tmp_path))
    assert with_disks(plain, tmp_path) == plain
    given = from_record(TrainConfig, settings(tmp_path) | {"checkpoint": {"pieces": {"local": "/scratch"}}})
    pieces = given.checkpoint.pieces
    assert pieces is not None
    expected = replace(pieces, local=f"{tmp_path}/$GROUP_RANK")
    assert with_disks(given, tmp_path).checkpoint.pieces == expected

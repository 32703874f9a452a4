"""A run whose rank is killed continues by itself, and its curve is that of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from hydragraph.commands import train
from tests.commands.conftest import trained  # noqa: F401
from tests.commands.tiny import LOPSIDED, computed, run, write
from tests.killed_once import MARK, killed_once
from tests.train.plain import settings

ROOT = Path(__file__).parent.parent
STEPS, LIMIT_S = 40, 300
KILLED_AT = 4  # the run has 6 steps and saves a checkpoint after the second
LOCAL = [sys.executable, "-m", "hydragraph.cli"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
]

pytestmark = pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="finds the ranks' processes in /proc, as Linux has it"
)


def configured(folder: Path, asynchronous: bool) -> Path:
    folder.mkdir()
    changes = {
        "ranks": 2,
        "strategies": ["<[0]x1,[1]x1>", "<[1]x2>"],
        "steps": STEPS,
        "checkpoint_every": 10,
        "evaluate_every": 0,
    }
    written = {"checkpoint": {"asynchronous": asynchronous}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings(folder), **changes, **written}))
    return folder / "config.yaml"


def curve(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [computed(json.loads(line)) for line in lines if line.endswith("\n")]


def begun(folder: Path) -> bool:
    """Say whether a run has gone on beyond a whole checkpoint."""
    checkpoints = folder / "run" / "checkpoints"
    whole = [path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return len(curve(folder)) >= 15 and bool(whole)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            found += [int(entry.name)] if parent == pid else []
    return found


def ranks(pid: int, torchrun: bool) -> list[int]:
    """Return the ranks' processes: torchrun's children, or those of the fork server."""
    return children(pid) if torchrun else [rank for child in children(pid) for rank in children(child)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the losses of an undisturbed run that takes as many steps as the runs that tests interrupt."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    result = run("train", configured(folder, False))
    assert result.exit_code == 0, result.output
    return curve(folder)


@pytest.mark.parametrize(
    ("torchrun", "number", "code"),
    [
        pytest.param(False, signal.SIGTERM, 0, marks=pytest.mark.thorough),
        pytest.param(False, signal.SIGINT, 130, marks=pytest.mark.thorough),
        # The agent hands a signal on, waits for its ranks, and ends with an error of its own.
        pytest.param(True, signal.SIGTERM, 1, marks=pytest.mark.thorough),
    ],
    ids=["launch", "Ctrl-C", "torchrun"],
)
def test_a_run_that_is_asked_to_stop_saves_and_its_curve_goes_on(
    torchrun: bool, number: signal.Signals, code: int, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    command = [*TORCHRUN, "-m", "hydragraph.cli"] if torchrun else LOCAL
    config = configured(tmp_path / "cut", asynchronous=not torchrun)
    process = subprocess.Popen(
        [*command, "train", str(config)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not begun(tmp_path / "cut") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, number)  # as a terminal or a cluster's scheduler does: all processes hear of it
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == code, errors[-3000:]
    done = len(curve(tmp_path / "cut"))
    assert 15 <= done < STEPS
    last = tmp_path / "cut" / "run" / "checkpoints" / f"step-{done:08d}"
    assert f"stopped after step {done} of {STEPS}, saved in {last}: continue with --resume" in errors
    result = run("train", config, "--resume")
    assert result.exit_code == 0, result.output
    assert curve(tmp_path / "cut") == undisturbed


def test_a_rank_that_is_killed_is_restarted_and_the_curve_is_the_same(
    trained: tuple[Path, Result],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command runs in this process, which is started already."""
    monkeypatch.setattr(train, "train_rank", partial(killed_once, 1, KILLED_AT))
    result = run("train", write(tmp_path, ranks=2, strategies=LOPSIDED), "--max-restarts", "1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / MARK).exists(), "no rank was killed"
    assert "continuing from" in result.stderr
    assert "step-000000" in result.stderr
    assert curve(tmp_path) == curve(trained[0])
    assert len(curve(tmp_path)) > KILLED_AT


@pytest.mark.thorough
@pytest.mark.parametrize("torchrun", [False, True], ids=["launch", "torchrun"])
def test_a_killed_rank_of_a_command_is_restarted(
    torchrun: bool, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    command = [*TORCHRUN, "-m", "hydragraph.cli"] if torchrun else LOCAL
    config = configured(tmp_path / "cut", asynchronous=not torchrun)
    arguments = [*command, "train", str(config), "--max-restarts", "1"]
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not begun(tmp_path / "cut") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(curve(tmp_path / "cut")) < STEPS - 10, "too late to disturb it"
        os.kill(ranks(process.pid, torchrun)[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    if not torchrun:
        assert "continuing from" in errors
        assert "step-000000" in errors
    assert curve(tmp_path / "cut") == undisturbed

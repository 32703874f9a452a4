"""`hydragraph train`: what it writes, its trace, and that a resumed run continues bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from typer.testing import Result

from hydragraph.cluster.processes.stop_requests import Interrupted
from hydragraph.cluster.supervision.coordinator import RunMachines
from hydragraph.commands.launch_process import first_seen, running_s
from hydragraph.commands.train import _nodes, _print_events, surviving
from hydragraph.train.config import TrainConfig
from hydragraph.train.goodput import WallTime
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.stragglers.run_events import RunEvent, append_event
from hydragraph.train.train_state import RunOutcome
from tests.commands.tiny import LOPSIDED, computed, run, write
from tests.thorough import thorough


def test_train_on_two_ranks(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    assert result.exit_code == 0, result.output
    assert "[rank" not in result.output  # --log-level does not request it
    history = read_metrics(folder / "run" / "metrics.jsonl")
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6]
    assert [m.strategy.split("@")[0] for m in history[:2]] == ["<tp1,pp2>", "<tp2,pp1>"]
    assert history[-1].loss < history[0].loss
    assert (folder / "run" / "loss.png").stat().st_size > 0
    assert all(m.exposed_pull_s >= 0 and m.seconds > m.planning_s > 0 and m.peak_memory_bytes > 1e6 for m in history)


def test_the_trace_shows_every_rank_and_step(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    spans = [e for e in json.loads((folder / "run" / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["args"]["step"]) for e in spans} == {(rank, step) for rank in (0, 1) for step in range(1, 7)}
    names = " ".join(e["name"] for e in spans)
    assert all(text in names for text in ("forward layer.0", "backward layer.1", "wait W.", "commit", "update"))


def test_resume_continues_bit_for_bit(trained: tuple[Path, Result], tmp_path: Path) -> None:
    folder, _ = trained
    whole = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    result = run("train", folder / "config.yaml", "--resume", "--set", f"output={tmp_path / 'run'}")
    assert result.exit_code == 0, result.output
    assert "Lost, slow and new ranks" not in result.stderr
    assert "lost work" not in result.stderr
    again = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [computed(line) for line in whole] == [computed(line) for line in again]


def test_no_time_is_told_as_a_negative_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_event(tmp_path / "events.jsonl", RunEvent(2, "fault", (1,), 0.0, "rank 1 is lost"))
    wall_time = WallTime(4.0, 300, 75.0, 4.0, 0.0, -0.01, -0.01, (), 0, 0)
    with mock.patch("hydragraph.train.goodput.account", return_value=wall_time):
        _print_events(RunOutcome(RunFolder(tmp_path)))
    assert "s of pauses, 0.0 s of lost work, 0.0 s of slower steps" in capsys.readouterr().err


def test_a_run_that_plans_for_itself_survives_lost_ranks_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survives(store: str | None = None, **changes: Any) -> bool:
        given = TrainConfig.load(write(tmp_path, **{"strategies": "auto", "ranks": 2} | changes))
        return surviving(given, store).elastic.survives

    assert survives()
    assert not survives(strategies=LOPSIDED)
    assert not survives(ranks=1)
    assert not survives(elastic={"min_ranks": 0})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert survives("etcd://a"), "this process starts the ranks of its machine, and the store names the leader"
    monkeypatch.setenv("MASTER_ADDR", "192.168.7.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not survives(), "the launcher ends all ranks when one is lost"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert survives(), "this process starts the ranks of its machine"
    assert not survives(elastic={"min_ranks": 0})
    assert not survives(strategies=LOPSIDED), "this process is one of the two ranks"
    assert survives(strategies=LOPSIDED, ranks=4), "the launcher's processes are too few to be the ranks"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not survives(strategies=LOPSIDED, ranks=4)


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this is the process of the first of two machines, with 4 GPUs."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)


@pytest.mark.usefixtures("first_of_two")
def test_one_process_per_machine_starts_a_rank_for_each_device_unless_ranks_is_given(tmp_path: Path) -> None:
    config = surviving(TrainConfig.load(write(tmp_path, strategies="auto", ranks=None, device=None)))
    assert _nodes(config, None) == RunMachines(0, 2, "a", 5, devices=4, fills=True)
    assert _nodes(replace(config, ranks=8), None) == RunMachines(0, 2, "a", 5, devices=4)


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(("elastic", "idle"), [({"min_ranks": 0}, True), ({}, False)])
def test_a_machine_with_several_gpus_and_one_rank_says_what_to_set(
    elastic: dict[str, int], idle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydragraph.commands.train._train", mock.Mock(side_effect=Interrupted(15)))
    result = run("train", write(tmp_path, strategies="auto", ranks=None, device=None, elastic=elastic))
    assert ("this machine has 4 GPUs, but 1 rank: set elastic.min_ranks to 1" in result.stderr) == idle


@thorough
def test_a_strategy_chosen_every_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    plan = {"choose": True, "gain": 0.0, "sample": 2}
    # Also with unequal shares of the state.
    config = write(
        tmp_path, ranks=2, strategies=[*LOPSIDED, "2*<tp1,pp1>"], steps=4, checkpoint_every=2, plan=plan, home="3,1"
    )
    first = run("train", config)
    assert first.exit_code == 0, first.output
    folder = tmp_path / "run"
    whole = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    again = run("train", config, "--resume")
    assert again.exit_code == 0, again.output
    resumed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [computed(line) for line in whole] == [computed(line) for line in resumed]


def test_every_rank_stops_when_rank_0_refuses(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    result = run("train", folder / "config.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("hydragraph: output ")
    assert "already holds a run: continue it with --resume" in result.stderr


@pytest.mark.parametrize("other", ["--resume", "--overwrite"])
def test_a_run_begins_in_one_way(tmp_path: Path, other: str) -> None:
    result = run("train", write(tmp_path), "--auto-resume", other)
    assert result.exit_code == 2
    assert "give one of them" in " ".join(result.output.split())


def test_a_run_that_is_under_way_is_left_alone(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    with RunFolder(folder / "run").owned():
        result = run("train", folder / "config.yaml", "--resume", "--max-restarts", "2")
    assert result.exit_code == 2
    assert "in use by another run (process " in " ".join(result.output.split())
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the store of a torchrun that has started this process."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }.items():
        monkeypatch.setenv(name, value)
    return store


def test_what_was_refused_is_refused_when_torchrun_starts_it_anew(
    trained: tuple[Path, Result], agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun gives no --resume; the folder held another job's run when this job's first attempt began."""
    folder, _ = trained
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        alone = ("--set", "ranks=1", "--set", "strategies=<tp1,pp1>")
        result = run("train", folder / "config.yaml", "--max-restarts", "1", *alone)
        assert result.exit_code == 2
        assert "already holds a run" in " ".join(result.output.split())
        assert (folder / "run" / "metrics.jsonl").read_bytes() == before


def test_later_attempts_of_a_torchrun_job_know_what_the_first_one_found(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_seen(0.0) == 0.0
    assert first_seen(1e9 + 1 / 3) == 0.0
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert first_seen(time.time() + 60) == 0.0, "it began after torchrun did"
    assert first_seen(1e9) == 1e9


@pytest.mark.parametrize("options", [["--rdzv-backend", "c10d"], ["--rdzv_backend=c10d"]])
def test_a_torchrun_that_would_end_all_machines_is_refused_with_a_store(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = ["--set", "elastic={copies: 2}", "--set", "ranks=2", "--store", "etcd://127.0.0.1"]
    with subprocess.Popen([sys.executable, "-c", "input()", *options], stdin=subprocess.PIPE) as started:
        monkeypatch.setattr(os, "getppid", lambda: started.pid)
        result = run("train", write(tmp_path), *settings)
        started.communicate(b"\n")
    assert result.exit_code == 2
    said = "torchrun --rdzv-backend c10d ends the run on all machines when one is lost: use the static"
    assert said in result.stderr


def test_how_long_a_process_has_been_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert 0 < running_s(process.pid) < 60
        assert running_s(os.getpid()) > running_s(process.pid)
    finally:
        process.kill()
        process.wait()

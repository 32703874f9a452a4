"""`hydragraph train` continues when its ranks are killed, and `hydragraph chaos` shows it."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydragraph.checkpoint.folder import complete
from hydragraph.commands import train
from hydragraph.commands.chaos import chaos_command
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.strategy import Strategy
from hydragraph.train.best_evaluation import lowest
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, parts_of_epochs, prepare, steps_of
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.stragglers.run_events import read_events
from tests.commands.tiny import run as run_here
from tests.cost import priced
from tests.killed_once import MARK, killed_once
from tests.thorough import thorough
from tests.train.plain import settings

ROOT = Path(__file__).parents[1]
LIMIT_S = 150.0


def written(folder: Path, **changed: Any) -> Path:
    """Write the config of a tiny run on three ranks."""
    config = settings(folder) | {
        "ranks": 3,
        "strategies": ["<tp1,pp2> + <tp1,pp1>"],
        "steps": 30,
        "check": "off",
        "checkpoint_every": 10,
        "evaluate_every": 10,
        "output": str(folder / "run"),
        "elastic": {"copies": 2},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | changed))
    return path


def started(path: Path, begin: str = "--overwrite") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hydragraph", "train", str(path), begin]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ranks(run: Path) -> list[int]:
    return [each["pid"] for each in json.loads((run / "ranks.json").read_text())]


def wait_for_step(run: Path, step: int) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if (run / "metrics.jsonl").is_file() and len(read_metrics(run / "metrics.jsonl")) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


def wait_for_event(run: Path, name: str) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if any(event.event == name for event in read_events(run / "events.jsonl")):
            return
        time.sleep(0.02)
    raise AssertionError(f"no {name} event came")


def devices(folder: Path) -> dict[str, str]:
    """Write a cluster of two fast devices and a slow one, and what the tiny model costs on them."""
    speeds = {"fast": 1.0, "slow": 2.5}
    profile, cluster = folder / "profile.json", folder / "cluster.yaml"
    Profile.merge([priced.profile(2, name, slower) for name, slower in speeds.items()]).save(profile)
    types = {name: DeviceType(1e15 / slower, 10**9, 1e12) for name, slower in speeds.items()}
    counts = zip(speeds, (2, 1), strict=True)
    nodes = tuple(Node(name, count, priced.FAST, priced.SLOW, cards=count) for name, count in counts)
    Cluster.of(types, nodes).save(cluster)
    return {"profile": str(profile), "cluster": str(cluster)}


def test_a_run_whose_leader_is_killed_continues_in_the_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that then leads makes a plan for the two unlike devices at once, and knows all evaluations so far.

    The command runs in this process, which is started already.
    """
    early = {"evaluate_every": 1, "keep_best": True, "patience": 2, "min_improvement": 100.0}  # only the first counts
    monkeypatch.setattr(train, "train_rank", partial(killed_once, 0, 1))
    elastic = {"copies": 2, "rejoin": False, "replan": True}
    done = run_here("train", written(tmp_path, elastic=elastic, plan={"choose": True, **devices(tmp_path)}, **early))
    run = tmp_path / "run"
    assert done.exit_code == 0, done.output
    before = [each["pid"] for each in json.loads((tmp_path / MARK).read_text())]
    assert ranks(run) == before[1:]
    history = read_metrics(run / "metrics.jsonl")
    assert [metrics.step for metrics in history] == list(range(1, 4)), "1, and 2 evaluations later"
    assert (run / "checkpoints" / f"step-{lowest(history):08d}" / "complete.json").is_file()
    events = [event for event in read_events(run / "events.jsonl") if event.event in ("fault", "resumed")]
    assert [event.event for event in events] == ["fault", "resumed"]
    assert events[0].ranks == (0,)
    found = re.search(r"with (.*)@", events[1].why)
    assert found, events[1].why
    assert len(Strategy.parse(found[1], 2).devices) == 2, "both fit, and gain"
    assert events[1].seconds > 0
    assert "all state was kept" in events[1].why
    assert events[1].moved_bytes > 0, "what the lost rank owned has two owners again"
    assert (run / "model" / "config.json").is_file()


@thorough
def test_a_rank_is_killed_while_state_moves_to_where_the_chosen_strategies_use_it(tmp_path: Path) -> None:
    strategies = ["<[0]x1,[1]x1> + <[2]x2>", "<[2]x1,[0]x1>"]
    chosen = {"strategies": strategies, "plan": {"choose": True, **devices(tmp_path)}, "steps": 60}
    losses = []
    for struck in (False, True):
        run = tmp_path / str(struck)
        process = started(written(tmp_path, **chosen, deterministic=True, output=str(run)))
        if struck:
            wait_for_event(run, "migrate")
            os.kill(ranks(run)[2], signal.SIGKILL)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
        events = [event.event for event in read_events(run / "events.jsonl")]
        assert events.count("fault") == struck
        assert "straggler" not in events, "nothing asks to watch the ranks"
        losses.append([metrics.loss for metrics in read_metrics(run / "metrics.jsonl")])
    assert len(losses[0]) == 60
    assert losses[0] == losses[1]


@thorough
def test_a_run_that_plans_for_itself_survives_a_lost_rank_without_being_asked(tmp_path: Path) -> None:
    process = started(written(tmp_path, strategies="auto", ranks=2, steps=60, elastic={}))
    run = tmp_path / "run"
    wait_for_step(run, 4)
    os.kill(ranks(run)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert {"fault", "resumed"} <= {event.event for event in read_events(run / "events.jsonl")}, said
    assert [metrics.step for metrics in read_metrics(run / "metrics.jsonl")] == list(range(1, 61))


@thorough
@pytest.mark.parametrize("how", ["at once", "one after the other"])
def test_a_run_that_plans_for_itself_survives_the_loss_of_all_its_first_ranks(how: str, tmp_path: Path) -> None:
    process = started(written(tmp_path, strategies="auto", ranks=2, steps=400, elastic={}))
    run = tmp_path / "run"
    wait_for_step(run, 4)
    first = ranks(run)
    os.kill(first[1], signal.SIGKILL)
    if how == "one after the other":
        end = time.monotonic() + LIMIT_S
        while set(now := ranks(run)) <= set(first) or len(now) < 2:
            assert time.monotonic() < end, "no rank joined"
            time.sleep(0.1)
        wait_for_step(run, len(read_metrics(run / "metrics.jsonl")) + 2)
    os.kill(first[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert [metrics.step for metrics in read_metrics(run / "metrics.jsonl")] == list(range(1, 401))


@thorough
def test_a_run_with_one_copy_goes_back_to_pieces_and_not_to_the_checkpoint(tmp_path: Path) -> None:
    pieces = {"local": str(tmp_path / "local")}
    process = started(written(tmp_path, elastic={"min_ranks": 1}, checkpoint={"pieces": pieces}, checkpoint_every=0))
    run = tmp_path / "run"
    wait_for_step(run, 8)
    os.kill(ranks(run)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    events = [event for event in read_events(run / "events.jsonl") if event.event == "resumed"]
    assert "read in pieces" in events[0].why, said
    assert events[0].step >= 4, "the only checkpoint is of step 0"
    assert events[0].read_bytes["memory"] > 0
    assert events[0].read_bytes["disk"] > 0, "what the lost rank had in its memory"
    assert [metrics.step for metrics in read_metrics(run / "metrics.jsonl")] == list(range(1, 31))


@thorough
def test_a_process_that_joins_evaluates_and_saves_at_the_same_steps(tmp_path: Path) -> None:
    parts = {"evaluate_every": 0, "evaluate_per_epoch": 2, "checkpoint_every": 0, "checkpoint_per_epoch": 1}
    path = written(tmp_path, steps=0, epochs=12, keep=99, **parts)
    process = started(path)
    run = tmp_path / "run"
    wait_for_step(run, 4)
    lost = ranks(run)[0]
    os.kill(lost, signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "join" in [event.event for event in read_events(run / "events.jsonl")], said
    assert len(ranks(run)) == 3
    assert lost not in ranks(run)
    config = TrainConfig.load(path)
    batches = partial(mini_batches, config, open_tokens(config, prepare(config)))
    steps = steps_of(config, batches())
    history = read_metrics(run / "metrics.jsonl")
    assert [metrics.step for metrics in history] == list(range(1, steps + 1))
    evaluated = {metrics.step for metrics in history if metrics.eval_loss is not None}
    assert evaluated == parts_of_epochs(batches(), 2, steps) | {steps}
    assert len(evaluated) >= 24
    saved = {step for step, _ in complete(run / "checkpoints")}
    assert saved >= parts_of_epochs(batches(), 1, steps) | {steps}


@thorough
def test_a_lost_rank_stays_lost_until_its_device_is_said_to_be_back(tmp_path: Path) -> None:
    process = started(written(tmp_path, steps=2000, elastic={"copies": 2, "rejoin": False}))
    run = tmp_path / "run"
    wait_for_step(run, 4)
    before = ranks(run)
    os.kill(before[1], signal.SIGKILL)
    wait_for_step(run, len(read_metrics(run / "metrics.jsonl")) + 20)
    assert ranks(run) == [before[0], *before[2:]]
    process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + LIMIT_S
    while len(ranks(run)) < len(before) and time.monotonic() < end:
        time.sleep(0.1)
    wait_for_step(run, len(read_metrics(run / "metrics.jsonl")) + 2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert len(ranks(run)) == len(before), said
    assert "join" in [event.event for event in read_events(run / "events.jsonl")]


@thorough
def test_a_process_that_is_killed_while_all_get_ready_is_replaced(tmp_path: Path) -> None:
    process = started(written(tmp_path))
    run = tmp_path / "run"
    end = time.monotonic() + LIMIT_S
    while not (run / "ranks.json").is_file() and time.monotonic() < end:
        time.sleep(0.005)
    os.kill(ranks(run)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert [metrics.step for metrics in read_metrics(run / "metrics.jsonl")] == list(range(1, 31))


@thorough
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_checkpoint_is_passed_over_if_state_is_lost(damage: str, tmp_path: Path) -> None:
    process = started(written(tmp_path, elastic={"min_ranks": 1}))
    run = tmp_path / "run"
    wait_for_step(run, 22)
    largest = max((run / "checkpoints/step-00000020").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data[:100] if damage == "truncated" else data)
    os.kill(ranks(run)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert bool([*run.glob("checkpoints/step-00000020.damaged-*")]) == (damage == "changed")
    assert [metrics.step for metrics in read_metrics(run / "metrics.jsonl")] == list(range(1, 31))


@thorough
def test_changed_settings_of_a_resumed_run_stay_changed_if_state_is_lost(tmp_path: Path) -> None:
    path = written(tmp_path, elastic={"min_ranks": 1, "rejoin": False}, steps=10)
    started(path).communicate(timeout=LIMIT_S)
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"steps": 40, "optimizer": {"weight_decay": 0.3}})
    )
    process = started(path, "--resume")
    run = tmp_path / "run"
    wait_for_step(run, 13)
    os.kill(ranks(run)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert any("state was lost" in event.why for event in read_events(run / "events.jsonl")), said
    saved = (run / "checkpoints/step-00000040/__0_0.distcp").read_bytes()
    assert b"weight_decay" in saved
    assert pickle.dumps(0.3, 2)[2:-1] in saved


@thorough
def test_too_few_ranks_save_and_end_with_a_sentence(tmp_path: Path) -> None:
    process = started(written(tmp_path, elastic={"copies": 2, "rejoin": False, "min_ranks": 3}))
    run = tmp_path / "run"
    wait_for_step(run, 3)
    os.kill(ranks(run)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    sentence = r"2 ranks are left, fewer than min_ranks .3.; the state is complete: step (\d+) is saved in"
    found = re.search(sentence, " ".join(said.split()))
    assert found, said
    assert (run / "checkpoints" / f"step-{int(found[1]):08d}" / "complete.json").is_file()


@thorough
def test_chaos_comes_to_the_same_curve(tmp_path: Path) -> None:
    path = written(tmp_path)
    command = [sys.executable, "-m", "hydragraph", "chaos", str(path), "--kills", "3", "--slow", "1", "--joins", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "processes left behind" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos failed" not in done.stderr
    assert all(option.replace("--", "") in chaos_command.__annotations__ for option in ("--kills", "--slow", "--joins"))


@thorough
def test_machines_are_preempted_and_the_curve_stays(tmp_path: Path) -> None:
    """Seed 2 takes a machine without a notice, so its state is read from pieces."""
    pieces = {"local": str(tmp_path / "local"), "shared": str(tmp_path / "shared")}
    config = {"ranks": 4, "strategies": ["4*<tp1,pp1>"], "elastic": {}, "evaluate_every": 0, "checkpoint_every": 0}
    path = written(tmp_path, checkpoint={"pieces": pieces}, **config)
    command = [
        sys.executable,
        "-m",
        "hydragraph",
        "chaos",
        str(path),
        "--kinds",
        "preempt",
        "--each",
        "1",
        "--seed",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=4 * LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"read in pieces +│ \d+\.\d MB from memory, ", done.stdout), done.stdout

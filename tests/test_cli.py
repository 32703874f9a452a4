"""The command line: what each verb prints, and that a mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hydragraph import cli
from hydragraph.train.metrics import read_metrics
from hydragraph.verify import Row
from tests.train.plain import settings

LOPSIDED = ["<[0]x1,[1]x1>", "<[0,1]x2>"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**settings(folder), **changes}))
    return file


def test_help_lists_the_verbs() -> None:
    shown = run("--help").stdout
    assert all(verb in shown for verb in ("train", "verify", "show"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "nowhere.yaml"), "nowhere.yaml"),
        (("train", "CONFIG", "--set", "optimizer.lrr=1"), "optimizer: unknown field 'lrr': did you mean 'lr'?"),
        (("train", "CONFIG", "--resume"), "holds no complete checkpoint"),
        (("train", "CONFIG", "--resume", "--overwrite"), "give one of them"),
        (("train", "CONFIG", "--set", 'strategies=["<tp2,pp1>"]'), "strategies[0]: pipeline 0, stage 0: unknown rank"),
        (("verify", "CONFIG", "--strategy", "<tp1"), "strategies[0]: strategy text"),
        (("show",), "show needs the YAML file of a run"),
        (("show", "CONFIG", "--strategy", "<tp1,pp1>", "--micro-batches", "1,2"), "--micro-batches '1,2'"),
        (("show", "CONFIG", "--strategy", "<tp1,pp1>", "--rank", "1"), "--rank 1: there are ranks 0 to 0"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    config = write(tmp_path)
    result = run(*(config if argument == "CONFIG" else argument for argument in arguments))
    assert result.exit_code == 2
    assert "hydragraph: " in result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_tracebacks_come_with_debug(tmp_path: Path) -> None:
    result = run("train", write(tmp_path), "--resume", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_show_lists_the_passes() -> None:
    result = run("show", "--passes")
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines()][:2] == [["1.", "order"], ["2.", "overlap"]]
    assert all(len(line.split()) > 4 for line in result.stdout.splitlines()), "each says what it does"


def test_show_prints_the_program_and_the_ranks(tmp_path: Path) -> None:
    config = write(tmp_path, ranks=2)
    program = run("show", config)
    assert program.exit_code == 0, program.stderr
    assert "layer.1" in program.stdout
    ranks = run("show", config, "--strategy", LOPSIDED[0], "--micro-batches", "3")
    assert ranks.exit_code == 0, ranks.stderr
    assert "rank 0 of 2" in ranks.stdout
    assert "rank 1 of 2" in ranks.stdout
    one = run("show", config, "--strategy", LOPSIDED[0], "--rank", "1")
    assert "rank 0 of 2" not in one.stdout
    assert "rank 1 of 2" in one.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder with a config and the run of it on two ranks, with checkpoints after steps 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    config = write(folder, ranks=2, strategies=LOPSIDED, steps=6)
    return folder, run("train", config, "--trace")


def test_train_on_two_ranks(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    assert result.exit_code == 0, result.output
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


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is measured, which no two runs have alike."""
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "seconds", "_bytes"))}


def test_resume_continues_bit_for_bit(trained: tuple[Path, Result], tmp_path: Path) -> None:
    folder, _ = trained
    whole = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    result = run("train", folder / "config.yaml", "--resume", "--set", f"output={tmp_path / 'run'}")
    assert result.exit_code == 0, result.output
    again = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [computed(line) for line in whole] == [computed(line) for line in again]


def test_a_strategy_chosen_every_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    plan = {"choose": True, "gain": 0.0, "sample": 2}
    config = write(tmp_path, ranks=2, strategies=[*LOPSIDED, "2*<tp1,pp1>"], steps=4, checkpoint_every=2, plan=plan)
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


def test_verify_passes_and_prints_a_table(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    result = run("verify", folder / "config.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("ok") == 2
    assert "WRONG" not in result.stdout


def test_verify_fails_beyond_the_tolerances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("<[0,1]x2>@aa", 1.0, 1.0, "w", 0.0, 1.0, 0.5), Row("<tp1,pp1>@bb", 1.0, 1.0, "w", 1.0, 1.0, 1.5)]
    monkeypatch.setattr(cli, "_verify_rank", lambda config: rows)
    result = run("verify", write(tmp_path))
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "[0,1]x2" in result.stdout.replace("\n", "")

"""`hydragraph report`: of a config, of a run and of a plan; and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from hydragraph.spec.default_cluster import default_cluster
from tests.commands.tiny import LOPSIDED, run, write
from tests.report.made import plan_record


def test_a_config_is_simulated(tmp_path: Path) -> None:
    config = write(tmp_path)
    told = run("report", config, "--devices", "2", "--strategy", "<[0]x1,[1]x1>", "--strategy", "<[0,1]x2>")
    assert told.exit_code == 0, told.output
    page = (tmp_path / "config.html").read_text()
    assert told.stdout.startswith(f"wrote {tmp_path / 'config.html'} (")
    assert page.count('role="tabpanel"') == 2
    assert "&lt;[0,1]x2&gt;" in page or "&lt;tp2,pp1&gt;" in page


def test_a_run_with_its_trace(trained: tuple[Path, Result], tmp_path: Path) -> None:
    source, result = trained
    assert result.exit_code == 0, result.output
    for name in ("config.yaml", "trace.json", "metrics.jsonl"):
        shutil.copy(source / "run" / name, tmp_path / name)
    told = run("report", tmp_path)
    assert told.exit_code == 0, told.output
    page = (tmp_path / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "measured, step" in page
    (tmp_path / "trace.json").unlink()
    assert run("report", tmp_path).exit_code == 0
    assert "train with --trace" in (tmp_path / "report.html").read_text()
    refused = run("report", tmp_path, "--profile", "profile.json")
    assert "is for a traced run, and this run has no trace" in refused.stderr


@pytest.mark.parametrize(
    ("changes", "shows", "note"),
    [
        ({"home": "1,1,1", "ranks": 3}, "Predicted and measured", ""),
        (
            {"plan": {"choose": True, "cluster": "one.yaml"}},
            "no trace",
            "the trace cannot be simulated, so the report ",
        ),
    ],
    ids=["home", "cluster"],
)
def test_a_trace_of_other_ranks_than_the_config_names(
    trained: tuple[Path, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    shows: str,
    note: str,
) -> None:
    """Ranks may be lost or join before the traced steps."""
    monkeypatch.chdir(tmp_path)
    source, _ = trained
    for name in ("trace.json", "metrics.jsonl"):
        shutil.copy(source / "run" / name, tmp_path / name)
    default_cluster(1).save(tmp_path / "one.yaml")
    write(tmp_path, **{"ranks": 2, "strategies": LOPSIDED, **changes})
    told = run("report", tmp_path)
    assert told.exit_code == 0, told.output
    assert shows in (tmp_path / "report.html").read_text()
    assert note in told.stderr


def test_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_record()))
    told = run("report", tmp_path / "plan.json", "--output", tmp_path / "shown.html")
    assert told.exit_code == 0, told.output
    assert "made up" in (tmp_path / "shown.html").read_text()


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("none.yaml", None, (), "does not exist"),
        ("plan.json", "{}", (), "not a plan"),
        ("plan.json", "[", (), "plan.json: "),
        ("plan.json", "{}", ("--devices", "4"), "--devices does not affect a finished plan"),
        ("run", "", (), "contains no steps of a run"),
        ("run", "", ("--set", "steps=3"), "--set is for simulating a config"),
        ("plan.json", "{}", ("--output", "nowhere/x.html"), "in the folder nowhere, which does not exist"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: str | None, options: tuple[str, ...], words: str) -> None:
    path = tmp_path / name
    if name == "run":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    told = run("report", path, *options)
    assert told.exit_code == 2
    assert words in " ".join(told.stderr.split())
    assert "bug" not in told.stderr

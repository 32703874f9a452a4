"""`hydragraph compare`: a traced run beside its simulation, as text and JSON, and what it corrects later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from hydragraph.cost.corrections import Corrections
from tests.commands.tiny import run
from tests.thorough import thorough


@pytest.fixture(scope="module")
def folder(trained: tuple[Path, Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a traced run, as the command writes into it."""
    source, result = trained
    assert result.exit_code == 0, result.output
    place = tmp_path_factory.mktemp("compared")
    for name in ("config.yaml", "trace.json"):
        shutil.copy(source / "run" / name, place / name)
    return place


def test_a_run_is_compared_by_kind_and_rank(folder: Path) -> None:
    result = run("compare", folder)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "computation is not measured" in shown
    assert "excluding steps 1, 2" in shown  # two strategies take turns
    assert all(kind in shown for kind in ("forward", "backward", "pull", "push", "send/receive", "update", "commit"))
    assert "largest error: " in shown
    assert "of the whole difference" in shown
    assert Corrections.load(folder / "corrections.json").types == ("", "")


def test_json_has_every_step_and_kind(folder: Path) -> None:
    result = run("compare", folder, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [step["step"] for step in record["steps"]] == [3, 4, 5, 6]
    assert {row["rank"] for row in record["kinds"]} == {None, 0, 1}
    for step in record["steps"]:
        assert 0 < step["measured_s"] <= step["seconds"] * 1.5  # a rank's own clock, and rank 0's whole step
    # Every second of a rank belongs to one kind.
    by_rank = sum(row["measured_s"] for row in record["kinds"] if row["rank"] == 0)
    assert by_rank == pytest.approx(sum(step["measured_s"] for step in record["steps"]), rel=0.5)


@thorough
def test_corrections_are_read_by_those_who_predict(folder: Path, trained: tuple[Path, Result]) -> None:
    assert run("compare", folder).exit_code == 0
    config = trained[0] / "config.yaml"
    for verb in (("simulate", config), ("check", config)):
        result = run(*verb, "--corrections", folder / "corrections.json")
        assert result.exit_code == 0, result.output
        assert "corrected: " in result.stdout


@pytest.mark.parametrize(
    ("files", "sentence"),
    [((), "is not a run"), (("config.yaml",), "train with hydragraph train --trace")],
)
def test_what_is_missing_is_said(folder: Path, tmp_path: Path, files: tuple[str, ...], sentence: str) -> None:
    for name in files:
        shutil.copy(folder / name, tmp_path / name)
    result = run("compare", tmp_path)
    assert result.exit_code == 2
    assert sentence in result.stderr

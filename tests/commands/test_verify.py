"""`hydragraph verify`: its table, and its exit code beyond the tolerances."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import Result

from hydragraph.commands import verify
from hydragraph.engine.single_device_parity import ParityRow
from tests.commands.tiny import LOPSIDED, run, write


def test_verify_passes_and_prints_a_table(trained: tuple[Path, Result]) -> None:
    folder, _ = trained
    # This strategy cuts the vocabulary, where label smoothing needs the mean of all columns.
    options = ("--strategy", LOPSIDED[1], "--home", "1,0", "--set", "label_smoothing=0.1")
    result = run("verify", folder / "config.yaml", *options)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"│ ok +│", result.stdout)) == 1
    assert "WRONG" not in result.stdout


def test_verify_fails_beyond_the_tolerances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ParityRow("<[0,1]x2>@aa", 1.0, 1.0, "w", 0.0, 1.0, 0.5),
        ParityRow("<tp1,pp1>@bb", 1.0, 1.0, "w", 1.0, 1.0, 1.5),
    ]
    monkeypatch.setattr(verify, "verify_rank", lambda config: rows)
    result = run("verify", write(tmp_path))
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "[0,1]x2" in result.stdout.replace("\n", "")

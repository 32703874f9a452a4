"""Output of a benchmark is saved with date, machine and versions, however it ends; every benchmark has a name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import record
from hydragraph.version import __version__


@pytest.mark.parametrize("code", [0, 3])
def test_a_record_says_what_was_printed_where_and_how_it_ended(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", f"print('ratio 0.98'); raise SystemExit({code})"]
    file = record.record("step", command, tmp_path / "results")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}-step\.md", file.name)
    assert capsys.readouterr().out == "ratio 0.98\n"
    text = file.read_text()
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", text, re.MULTILINE))
    assert rows["exit code"] == str(code)
    assert rows["command"].startswith("`python -c ")
    assert "raise SystemExit" in rows["command"]
    assert rows["versions"].endswith(f"torch {torch.__version__}, hydragraph {__version__}")
    assert re.search(r"\d+ cores", rows["machine"])
    assert text.endswith("```\nratio 0.98\n```\n")


def test_every_benchmark_has_a_table_to_keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a program of its own that prints; `record` runs it by its name."""
    asked: list[list[str]] = []

    def recorded(title: str, command: list[str]) -> Path:
        asked.append([title, *command[1:]])
        return tmp_path

    monkeypatch.setattr(record, "record", recorded)
    for path in sorted(record.HERE.glob("*.py")):
        text = path.read_text()
        assert 'if __name__ == "__main__":' in text, path.name
        assert "print(" in text, path.name
        if path.stem != "record":
            monkeypatch.setattr(sys, "argv", ["record", path.stem, "--rounds", "1"])
            record.main()
            assert asked[-1] == [path.stem, "-m", f"benchmarks.{path.stem}", "--rounds", "1"]

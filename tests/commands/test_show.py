"""`hydragraph show`: the passes, the program, and the programs of the ranks."""

from __future__ import annotations

from pathlib import Path

from tests.commands.tiny import LOPSIDED, run, write


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

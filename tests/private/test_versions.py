"""Versions of PyTorch that are too old, tested, or newer; pyproject.toml and README must agree with them."""

from __future__ import annotations

import logging
import re
import tomllib

import pytest
import torch

from hydragraph.errors import Unsupported
from hydragraph.private.versions import TESTED, check_torch
from tests.matrix import BEGIN, END, README, ROOT, ROWS, oldest_requirements


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    check_torch.cache_clear()


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu130", "1.13.1"])
def test_an_old_one_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=rf"PyTorch: version {re.escape(version)}; install torch>=2.11"):
        check_torch(version)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_new_one_is_one_line_on_one_rank(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        check_torch("3.0.0a0+git1234")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * lines
    assert all("untested with PyTorch 3.0.0a0" in record.message for record in caplog.records)


def test_this_one_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    check_torch(str(torch.__version__))
    assert not caplog.records


def test_the_matrix_has_a_row_for_each_and_pyproject_the_same_bounds() -> None:
    assert {".".join(row.torch.split(".")[:2]) for row in ROWS} == set(TESTED)
    project = (ROOT / "pyproject.toml").read_text()
    assert f"torch>={TESTED[0]}" in tomllib.loads(project)["project"]["dependencies"]
    assert f"transformers=={'5.4'}.*" in oldest_requirements(project)
    assert any(row.oldest and row.torch.startswith(TESTED[0]) for row in ROWS)


def test_readme_has_the_table() -> None:
    table = README.read_text().partition(BEGIN)[2].partition(END)[0]
    for row in ROWS:
        assert re.search(rf"^\| {re.escape(row.torch)}", table, re.MULTILINE), row

"""Later ranks read what the first ranks made from a private folder, complete, or make it again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hydragraph.cluster.processes.rank_process import KEPT
from hydragraph.cluster.processes.restart_cache import keep, kept


def made() -> dict[str, object]:
    raise AssertionError("it already exists")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(KEPT, str(tmp_path))
    return tmp_path


def test_what_was_kept_is_not_made_again(folder: Path) -> None:
    keep({"weights": torch.arange(5.0), "name": "a"}, "capture", "key")
    found = kept("capture", "key", made)
    assert found["name"] == "a"
    assert torch.equal(found["weights"], torch.arange(5.0))  # pyrefly: ignore[bad-argument-type]
    assert [path.name for path in folder.iterdir()] == ["key"], "partial files are removed"
    assert kept("capture", "another key", lambda: 7) == 7


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KEPT, raising=False)
    monkeypatch.chdir(tmp_path)
    keep(1, "capture", "key")
    assert kept("capture", "key", lambda: 2) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["damaged", "not private"])
def test_what_cannot_be_trusted_or_read_is_made_again(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    keep(1, "capture", "key")
    if how == "damaged":
        (folder / "key").write_bytes((folder / "key").read_bytes()[:20])
    else:
        folder.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert kept("capture", "key", lambda: 2) == 2
    assert "computing it again" in caplog.text


def test_what_cannot_be_pickled_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        keep((i for i in range(3)), "capture", "key")
    assert "ranks that join later compute their own" in caplog.text
    assert list(folder.iterdir()) == []

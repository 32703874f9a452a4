"""Inductor's code is loaded from a folder only where the user trusts it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hydragraph.ahead import inductor_code
from hydragraph.ahead.inductor_code import FILE, write_code
from hydragraph.ahead.load import load
from tests.ahead.folders import written
from tests.models import captured


def test_code_is_left_alone_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[bytes] = []

    def take(content: bytes) -> bool:
        loaded.append(content)
        return True

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", take)
    program, model = captured("llama")
    (tmp_path / FILE).write_bytes(b"code")
    written(tmp_path, model, program, "<[0]x2>")
    with caplog.at_level(logging.INFO, "hydragraph"):
        load(tmp_path)
    assert loaded == []
    assert "is code, and is left alone: --trust, or trust=True, loads it" in caplog.text
    load(tmp_path, trust=True)
    assert loaded == [b"code"]


def test_what_pytorch_cannot_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    inductor_code.load_code(b"no artifacts", Path("compiled"))
    assert "Inductor compiles anew" in caplog.text


def test_nothing_is_written_where_nothing_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    assert not write_code(tmp_path)
    assert not (tmp_path / FILE).exists()

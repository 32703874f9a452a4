"""Inductor's code is loaded from a folder only where the user trusts it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydragraph.frontend.compiled_folder import inductor_code
from hydragraph.frontend.compiled_folder.inductor_code import FILE, write_code
from hydragraph.frontend.compiled_folder.load import load
from tests.commands.tiny import write
from tests.frontend.compiled_folder.folders import written
from tests.models import captured
from tests.thorough import thorough


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
    assert "pass --trust or trust=True" in caplog.text
    load(tmp_path, trust=True)
    assert loaded == [b"code"]


def test_what_pytorch_cannot_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    inductor_code.load_code(b"no artifacts", Path("compiled"))
    assert "Inductor will compile the graphs again" in caplog.text


def test_nothing_is_written_where_nothing_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    assert not write_code(tmp_path)
    assert not (tmp_path / FILE).exists()


def hydragraph(folder: Path, cache: str, *arguments: str) -> str:
    """Run the command line with an Inductor cache of its own; return Inductor's log."""
    done = subprocess.run(
        [sys.executable, "-m", "hydragraph", *arguments],
        cwd=folder,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / cache), "TORCH_LOGS": "+torch._inductor.codecache"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@thorough
def test_ranks_find_code_that_they_may_trust_and_train_to_the_same_bits(tmp_path: Path) -> None:
    data = {"paths": [str(tmp_path / "texts")], "vocab_size": 260, "tokens_per_step": 96, "max_length": 32}
    write(tmp_path, ranks=2, strategies=["<[0,1]x2>"], backend="inductor", check="off", steps=2, data=data)
    hydragraph(tmp_path, "there", "compile", "config.yaml", "--output", "out", "--trust")
    losses = []
    for cache, more, found in (
        ("trusting", ["--compiled", "out", "--trust"], True),
        ("wary", ["--compiled", "out"], False),
        ("alone", [], False),
    ):
        said = hydragraph(tmp_path, cache, "train", "config.yaml", *more)
        assert ("fx graph cache miss" in said) != found  # where it is not found, one rank may find what another made
        assert "fx graph cache hit" in said or not found
        (tmp_path / "run").rename(tmp_path / f"run-{cache}")
        lines = (tmp_path / f"run-{cache}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] == losses[2]

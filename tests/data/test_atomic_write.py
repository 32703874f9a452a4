"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydragraph.data.atomic_write import write_whole


def test_a_file_is_replaced_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, "one")
    write_whole(file, "two")
    assert file.read_text() == "two"
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_whole(file, "three")
    assert file.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

"""The user's cache folder: files are whole or missing, and those used longest ago go first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hydragraph.frontend import user_cache


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def read(path: Path) -> str | None:
    content: str | None = user_cache.read_packed(path, json.loads)
    return content


def write(path: Path, content: str) -> None:
    user_cache.write_packed(path, lambda: content, 99)


def test_what_is_written_is_read_and_nothing_is_left_beside_it() -> None:
    path = user_cache.folder("graphs") / "one"
    assert read(path) is None
    write(path, "content")
    write(path, "changed")
    assert read(path) == "changed"
    assert [*user_cache.folder("graphs").iterdir()] == [path]


def test_without_a_variable_it_is_in_the_home_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(base))
    assert user_cache.folder("graphs") == base / ".cache" / "hydragraph" / "graphs"


def test_a_folder_that_cannot_be_written_keeps_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "file"))
    path = user_cache.folder("graphs") / "one"
    write(path, "content")
    assert read(path) is None


def test_a_file_that_cannot_be_marked_as_used_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_cache.folder("graphs") / "one"
    write(path, "content")

    def refused(*_: object) -> None:
        raise PermissionError("a read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    assert read(path) == "content"


def test_files_used_longest_ago_are_deleted_down_to_three_quarters() -> None:
    paths = [user_cache.folder("graphs") / str(i) for i in range(9)]
    for age, path in enumerate(paths):
        write(path, "")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert read(paths[-1]) == ""  # so it is the one used last
    user_cache.evict("graphs", 9)
    assert sum(path.exists() for path in paths) == 9
    user_cache.evict("graphs", 8)
    assert [path for path in paths if path.exists()] == [*paths[:5], paths[-1]]

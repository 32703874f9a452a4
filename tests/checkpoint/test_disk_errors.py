"""Failures of file operations raise an OSError that names the cause and the file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hydragraph.checkpoint import disk_errors
from hydragraph.checkpoint.disk_errors import file_errors, refusal

TORCH = "[enforce fail at inline_container.cc:672] . unexpected pos 1408 vs 1302"


def test_where_is_added_to_an_error_that_lacks_it(tmp_path: Path) -> None:
    said = r"No space left on device: .*shown"
    with (
        pytest.raises(OSError, match=said),
        file_errors(tmp_path, tmp_path / "shown"),
        Path("/dev/full").open("w") as f,
    ):
        f.write("x")
    with pytest.raises(FileNotFoundError, match="other"), file_errors(tmp_path, tmp_path / "shown"):
        (tmp_path / "other").read_text()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_what_torch_says_becomes_what_the_system_says(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_errors, "refusal", lambda directory: OSError(number, "as the system says"))
    with pytest.raises(OSError, match="shown") as caught, file_errors(tmp_path, tmp_path / "shown"):
        raise RuntimeError(TORCH)
    assert caught.value.errno == number
    monkeypatch.setattr(disk_errors, "refusal", lambda directory: None)  # room was made meanwhile
    with pytest.raises(OSError, match="shown") as caught, file_errors(tmp_path, tmp_path / "shown"):
        raise RuntimeError(TORCH)
    assert caught.value.errno == errno.EIO


def test_other_errors_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), file_errors(tmp_path, tmp_path):
        raise RuntimeError("something else")


def test_a_directory_is_probed_and_left_as_it_was(tmp_path: Path) -> None:
    assert refusal(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    gone = refusal(tmp_path / "gone")
    assert gone is not None
    assert gone.errno == errno.ENOENT

"""A checkpoint appears whole or not at all, replaces nothing else, and old ones go."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.folder import complete, prune
from hydragraph.cluster.communicators import Groups
from tests.runtime.homes import ALONE, make


def test_only_a_checkpoint_is_replaced(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="notes: this path exists, but has no"):
        save_and_load.save(tmp_path / "notes", home, optimizer, {}, groups)
    assert (tmp_path / "notes" / "thesis.txt").exists()
    for number in (1, 2):
        save_and_load.save(tmp_path / "deep" / "c", home, optimizer, {"number": number}, groups)
    assert save_and_load.load(tmp_path / "deep" / "c", home, optimizer, groups) == {"number": 2}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    link = tmp_path / "latest"
    link.symlink_to("step-1")
    for number in (1, 2):
        save_and_load.save(link, home, optimizer, {"number": number}, groups)
    assert link.is_symlink()
    assert save_and_load.load(link, home, optimizer, groups) == {"number": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_replacement_that_fails_to_move_in_is_undone(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise OSError("no rename today")
        return rename(path, target)

    with mock.patch.object(Path, "rename", refuse), pytest.raises(OSError, match="no rename today"):
        save_and_load.save(made, home, optimizer, {"step": 8}, groups)
    assert save_and_load.load(made, home, optimizer, groups) == {"step": 7}
    assert [path.name for path in made.parent.iterdir()] == ["step-7"]
    made.rename(made.with_name("step-7.old-01234567"))  # as if it had died in between
    with pytest.raises(
        ValueError, match=r"rename .*step-7.old-01234567, the checkpoint that a crashed save moved aside, to step-7"
    ):
        save_and_load.load(made, home, optimizer, groups)


def test_complete_and_prune(tmp_path: Path, groups: Groups) -> None:
    assert complete(tmp_path / "nowhere") == complete(tmp_path) == []
    prune(tmp_path, 1)
    home, optimizer = make(ALONE)
    for number in (2, 9, 10):
        save_and_load.save(tmp_path / f"step-{number}", home, optimizer, {}, groups)
    others = ["step-11", "step-10.tmp-00000000", "step-9.old-ffffffff", "step-11.tmp-00000000", "step-1-mine"]
    for name in others:
        (tmp_path / name).mkdir()
    assert complete(tmp_path)[-1] == (10, tmp_path / "step-10")
    prune(tmp_path, 2)
    kept = {"step-9", "step-10", "step-11", "step-11.tmp-00000000", "step-1-mine"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    with pytest.raises(ValueError, match="keep=0"):
        prune(tmp_path, 0)

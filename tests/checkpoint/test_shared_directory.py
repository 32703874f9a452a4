"""Hosts without a shared directory: a checkpoint is refused before anything is written, and read from copies safely."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.folder import prune
from hydragraph.checkpoint.shared_directory import leave_mark, see
from hydragraph.cluster.launch import join, launch
from tests.runtime.homes import Snapshot, groups_of, outcome, step, trained

RANKS = 3
ELSEWHERE = 2  # the rank that sees another directory


def apart(folder: Path) -> list[tuple[str, str]]:
    """Save and load where rank 2 has a directory of its own; return every outcome."""
    world = join("cpu")
    groups = groups_of(world)
    home, optimizer = trained(world, "adamw")
    os.chdir(folder / ("there" if world.rank == ELSEWHERE else "here"))  # one path, which is not the same everywhere
    found = [outcome(lambda: save_and_load.save("c", home, optimizer, {}, groups))]
    save_and_load.save(folder / "here" / "c", home, optimizer, {"step": 2}, groups)
    saved = Snapshot.of(home, optimizer)
    step(home, optimizer, 3)
    found.append(outcome(lambda: save_and_load.load("c", home, optimizer, groups)))
    copy = folder / "there" / "c"
    for damaged in [None, *sorted(p.name for p in (folder / "here" / "c").iterdir())]:
        groups.gather(None)
        if world.rank == ELSEWHERE:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder / "here" / "c", copy)
            if damaged is not None:
                _flip(copy / damaged)
        groups.gather(None)
        found.append(outcome(lambda: save_and_load.load("c", home, optimizer, groups)))
        if damaged is None:
            _assert_same(Snapshot.of(home, optimizer), saved)
    return found


def _assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert all(torch.equal(found.shards[name][1], tensor) for name, (_, tensor) in wanted.shards.items())


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_hosts_with_directories_of_their_own_are_refused_or_read_what_was_saved(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    by_rank = launch(apart, RANKS, tmp_path)
    for unseen, lacking, whole, *damages in by_rank:
        assert unseen[0] == "ValueError", unseen
        assert f"rank {ELSEWHERE} on " in unseen[1]
        assert "name a directory that all hosts share" in unseen[1]
        assert lacking[0] == "ValueError", lacking
        assert f"ranks [{ELSEWHERE}] see no complete.json there" in lacking[1]
        assert whole == ("", "")
        assert len(damages) == RANKS + 2  # a file of each rank, .metadata and complete.json
        for kind, words in damages:  # a copy's damage is found by those who read the copy, whoever wrote that file
            assert kind, words
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["c"]  # a refused save leaves no files
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["c"]  # but the copy


def test_a_mark_is_seen_where_it_was_left_and_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    mark = leave_mark(tmp_path)
    see(mark, "output", 1)
    mark.unlink()
    prune(tmp_path, 1)
    with pytest.raises(ValueError, match=r"output: rank 1 on \S+ does not see what rank 0 writes there"):
        see(mark, "output", 1)

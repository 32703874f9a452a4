"""Saving beside training: the state at the time of the call, whole or not at all, and no error is lost."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import hydragraph as hg
from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.background_save import Saver
from hydragraph.checkpoint.folder import complete
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import PRELOAD, join, launch
from hydragraph.runtime.shard_boxes import OwnedBoxes
from tests.models import sequences
from tests.ready import Ready, small_llama
from tests.runtime.homes import ALONE, KINDS, Snapshot, make, outcome, step, trained, whole

LIMIT = timedelta(seconds=60)


def groups_and_saver() -> tuple[Groups, Saver]:
    world = join("cpu")
    return Groups(world, LIMIT), Saver(world, LIMIT)


def held(event: threading.Event) -> Any:
    """Make writing wait for an event."""
    write = dcp.FileSystemWriter.write_data

    def wait_and_write(*arguments: Any) -> object:
        assert event.wait(LIMIT.total_seconds())
        return write(*arguments)

    return mock.patch.object(dcp.FileSystemWriter, "write_data", wait_and_write)


def failing(error: BaseException) -> Any:
    return mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=error)


# What is written.


def test_the_thread_uses_the_gpu_of_its_rank() -> None:
    world = mock.MagicMock(device=torch.device("cuda", 3))
    with (
        mock.patch.object(torch.cuda, "set_device") as uses,
        mock.patch.object(save_and_load, "write", side_effect=lambda *_: uses.assert_called_once_with(world.device)),
    ):
        saver = Saver(world, LIMIT)
        saver._write(mock.MagicMock(), mock.MagicMock())
    assert not saver.failed


def save_and_go_on(folder: Path) -> tuple[Snapshot, Snapshot]:
    """Start a save, train while writing is blocked, then unblock it and load the checkpoint."""
    groups, saver = groups_and_saver()
    rank, event = groups.world.rank, threading.Event()
    home, optimizer = trained(groups.world, "adamw")
    saved = Snapshot.of(home, optimizer)
    extra = {"list": [1]}
    with held(event):
        saver.start(folder / "c", home, optimizer, extra, groups)
        extra["list"].append(2)
        for seed in (3, 4):
            step(home, optimizer, seed)
            groups.gather(rank)  # training communicates while the save is under way
        optimizer.param_groups[0]["lr"] = 7.0
        groups.gather(rank)
        assert not (folder / "c").exists()
        assert not saver.failed
        event.set()
        saver.wait()
    assert any(not torch.equal(saved.shards[name][1], parameter) for name, parameter in home.parameters.items())
    assert save_and_load.load(folder / "c", home, optimizer, groups) == {"list": [1]}
    loaded = Snapshot.of(home, optimizer)
    saver.close()
    return saved, loaded


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    by_rank = launch(save_and_go_on, 3, tmp_path)
    expected, found = whole([saved for saved, _ in by_rank]), whole([loaded for _, loaded in by_rank])
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert all(loaded.groups == saved.groups for saved, loaded in by_rank)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    groups, saver = groups_and_saver()
    home, optimizer = make(ALONE)
    for number in (1, 2, 3):
        saver.start(tmp_path / "c", home, optimizer, {"number": number}, groups)
    saver.close()
    assert save_and_load.load(tmp_path / "c", home, optimizer, groups) == {"number": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_copy_shares_no_memory_with_the_state(tmp_path: Path) -> None:
    groups, _ = groups_and_saver()
    home, optimizer = trained(ALONE, "adamw")
    prepared = save_and_load.prepare(tmp_path / "c", home, optimizer, {}, groups)
    copied = prepared.snapshot()
    own = {t.untyped_storage().data_ptr() for t in home.weights.values()}
    own |= {s.untyped_storage().data_ptr() for state in optimizer.state.values() for s in state.values()}
    values = [
        (prepared.contents[name], value) for name, value in copied.contents.items() if not isinstance(value, bytes)
    ]
    assert len(values) == 4 * len(home.parameters)  # the weights and three states of AdamW
    for original, copy in values:
        assert isinstance(original, OwnedBoxes)
        assert original.boxes.keys() == copy.boxes.keys()
        for offsets, box in copy.boxes.items():
            assert box.untyped_storage().data_ptr() not in own
            assert torch.equal(box, original.boxes[offsets])


# What fails.


def fail_in_the_background(folder: Path) -> list[tuple[str, str]]:
    """Fail on rank 1 at writing and on rank 0 at the end; then save well."""
    groups, saver = groups_and_saver()
    rank, path, outcomes = groups.world.rank, folder / "c", []
    home, optimizer = trained(groups.world, "adamw")
    saver.start(path, home, optimizer, {"number": 1}, groups)
    saver.wait()
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing(full) if rank == 1 else nullcontext():
        outcomes.append(outcome(lambda: saver.start(path, home, optimizer, {"number": 2}, groups)))
        outcomes.append(outcome(saver.wait))
    outcomes.append(outcome(saver.wait))  # the error is raised once
    rename = mock.patch.object(Path, "rename", side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with rename if rank == 0 else nullcontext():
        saver.start(path, home, optimizer, {"number": 3}, groups)
        outcomes.append(outcome(lambda: saver.start(path, home, optimizer, {"number": 4}, groups)))
    assert save_and_load.load(path, home, optimizer, groups) == {"number": 1}
    assert [p.name for p in folder.iterdir()] == ["c"]
    groups.gather(None)
    if rank == 0:
        (folder / "thesis").mkdir()
        (folder / "thesis" / "text").write_text("years of work")
    outcomes.append(outcome(lambda: saver.start(folder / "thesis", home, optimizer, {}, groups)))
    with (
        mock.patch.object(save_and_load.PendingCheckpoint, "snapshot", side_effect=MemoryError)
        if rank == 1
        else nullcontext()
    ):
        outcomes.append(outcome(lambda: saver.start(path, home, optimizer, {}, groups)))
    groups.gather(None)  # rank 0 clears up
    assert sorted(p.name for p in folder.iterdir()) == ["c", "thesis"]
    saver.start(path, home, optimizer, {"number": 5}, groups)
    saver.close()
    assert save_and_load.load(path, home, optimizer, groups) == {"number": 5}
    return outcomes


def test_an_error_in_the_background_is_everybodys_and_loses_nothing(tmp_path: Path) -> None:
    by_rank = launch(fail_in_the_background, 2, tmp_path)
    begun, full, again, denied, other, memory = zip(*by_rank, strict=True)
    assert set(begun) == {("", "")}
    assert set(again) == {("", "")}
    path = tmp_path / "c"
    said = f"[Errno 28] No space left on device: '{path}'"
    assert full == (("RankFailure", f"rank 1 failed at `save checkpoint {path}`: OSError: {said}"), ("OSError", said))
    said = f"[Errno 13] Permission denied: '{path}'"
    told = ("RankFailure", f"rank 0 failed at `save checkpoint {path}`: PermissionError: {said}")
    assert denied == (("PermissionError", said), told)
    assert {kind for kind, _ in other} == {"ValueError"}
    assert all("so it is not a checkpoint" in text for _, text in other)
    assert [kind for kind, _ in memory] == ["RankFailure", "MemoryError"]


# Through hydragraph.compile.


def compiled(ready: Ready) -> hg.Executable:
    strategy = hg.Strategy.parse("<[0]x1,[1]x1>", layers=2)
    return ready.executable(strategy, lambda named: torch.optim.AdamW(named, lr=1e-2))


def save_while_training(ready: Ready, folder: Path) -> tuple[list[tuple[str, str]], list[bool]]:
    """Save while training, fail once, and train on; return errors, and what must be the same."""
    exe = compiled(ready)
    batch = sequences([9, 14, 5])
    exe.step(batch)
    before = exe.full_state_dict()
    exe.save(folder / "c", {"note": "one"}, asynchronous=True)
    exe.step(batch)
    exe.wait_saved()
    outcomes, same = [], []
    event = threading.Event()
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing(full) if exe.rank == 1 else held(event):
        exe.save(folder / "c", {"note": "two"}, asynchronous=True)
        held_back = {n: w.clone() for n, w in exe.home.weights.items()}
        if exe.rank == 0:
            event.set()
        # Else the step could come before the error, and the next one would raise it.
        while not exe._session.saver.failed:
            threading.Event().wait(0.01)
        outcomes.append(outcome(lambda: exe.step(batch)))
    same.append(all(torch.equal(held_back[n], w) for n, w in exe.home.weights.items()))
    exe.step(batch)  # the run continues
    assert exe.load(folder / "c") == {"note": "one"}
    found = exe.full_state_dict()
    same.append(all(torch.equal(found[n], t) for n, t in before.items()))
    exe.step(batch)
    exe.step(batch)
    exe.save(folder / "d", asynchronous=True)
    exe.close()  # waits
    return outcomes, same


def test_a_failed_save_stops_the_next_step_of_every_rank_and_the_run_may_go_on(tmp_path: Path) -> None:
    by_rank = hg.launch(save_while_training, 2, small_llama(), tmp_path, timeout=timedelta(seconds=120))
    path = tmp_path / "c"
    said = f"[Errno 28] No space left on device: '{path}'"
    told = ("RankFailure", f"rank 1 failed at `save checkpoint {path}`: OSError: {said}")
    assert [outcomes for outcomes, _ in by_rank] == [[told], [("OSError", said)]]
    assert all(all(same) for _, same in by_rank)
    assert (tmp_path / "d" / "complete.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


# Processes that end.


def end_while_saving(how: str, folder: Path) -> None:
    groups, saver = groups_and_saver()
    home, optimizer = trained(groups.world, "sgd")
    saver.start(folder / "c", home, optimizer, {"number": 1}, groups)
    saver.wait()
    finish, ending = dcp.FileSystemWriter.finish, threading.Event()

    def act(*arguments: Any, **options: Any) -> None:
        assert ending.wait(LIMIT.total_seconds())
        finish(*arguments, **options)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(dcp.FileSystemWriter, "finish", act).start()
    saver.start(folder / "c", home, optimizer, {"number": 2}, groups)
    ending.set()
    if how == "kill":
        saver.wait()
    raise SystemExit(5)


def ended(how: str, folder: Path) -> int | None:
    """Run `end_while_saving` in a process of its own; return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=end_while_saving, args=(how, folder))
    process.start()
    process.join(LIMIT.total_seconds())
    return process.exitcode


@pytest.mark.parametrize(
    ("how", "code", "number"), [("kill", -signal.SIGKILL, 1), ("exit", 5, 2)], ids=["killed", "ends by itself"]
)
def test_a_process_that_ends_waits_and_one_that_is_killed_loses_only_the_new(
    how: str, code: int, number: int, tmp_path: Path
) -> None:
    assert ended(how, tmp_path) == code
    groups, _ = groups_and_saver()
    home, optimizer = trained(ALONE, "sgd")
    assert save_and_load.load(tmp_path / "c", home, optimizer, groups) == {"number": number}
    assert complete(tmp_path) == []
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == (2 if how == "kill" else 1)


def die_in_the_background(folder: Path) -> None:
    """Rank 1 is killed while both are writing."""
    groups, saver = groups_and_saver()
    home, optimizer = trained(groups.world, "sgd")
    saver.start(folder / "c", home, optimizer, {"number": 1}, groups)
    saver.wait()

    def die(*_: Any) -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with mock.patch.object(dcp.FileSystemWriter, "write_data", die) if groups.world.rank == 1 else nullcontext():
        saver.start(folder / "c", home, optimizer, {"number": 2}, groups)
        try:
            saver.wait()
        except hg.RankFailure as error:
            (folder / "said").write_text(str(error))
            raise


def test_a_rank_that_is_killed_while_writing_leaves_the_previous_checkpoint_whole(tmp_path: Path) -> None:
    with pytest.raises(hg.RankFailure):
        launch(die_in_the_background, 2, tmp_path, timeout=timedelta(seconds=120))
    groups, _ = groups_and_saver()
    home, optimizer = make(ALONE, KINDS["sgd"], seed=4)
    assert save_and_load.load(tmp_path / "c", home, optimizer, groups) == {"number": 1}
    assert f"save checkpoint {tmp_path / 'c'}" in (tmp_path / "said").read_text()

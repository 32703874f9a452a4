"""Run folders: how runs begin in them, and which checkpoints count."""

from __future__ import annotations

import os
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.config import AdapterConfig, CheckpointConfig, LoraConfig, TrainConfig
from hydragraph.train.pieces_config import PiecesConfig
from hydragraph.train.run_folder import Begin, RunFolder
from hydragraph.train.stragglers.run_events import Name, RunEvent, append_event, read_events
from tests.train.plain import settings


def config(folder: Path, steps: int = 9) -> TrainConfig:
    return from_record(TrainConfig, {**settings(folder), "steps": steps})


def save(folder: RunFolder, step: int) -> None:
    folder.place(step).mkdir(parents=True)
    (folder.place(step) / "complete.json").write_text("{}")  # what `runtime.checkpoint` knows a checkpoint by


def test_resumes_from_the_latest_checkpoint_that_is_complete(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.begin(config(tmp_path), "new") is None
    save(folder, 4)
    save(folder, 2)
    folder.place(6).mkdir()
    last = folder.begin(config(tmp_path), "resume")
    assert last is not None
    assert (last.step, last.path) == (4, folder.place(4))


def test_an_adapter_keeps_its_scaling(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    settings: tuple[dict[str, Any], ...] = ({}, {"alpha": 64.0}, {"rslora": True})
    first, alpha, rslora = (
        replace(config(tmp_path), adapter=AdapterConfig(LoraConfig(r=2, **changed))) for changed in settings
    )
    folder.begin(first, "new")
    save(folder, 4)
    dropout = replace(first, adapter=AdapterConfig(LoraConfig(r=2, dropout=0.1)))
    assert folder.begin(dropout, "resume") is not None
    for changed, name in ((alpha, "alpha is 64.0"), (rslora, "rslora is True")):
        with pytest.raises(ValueError, match=rf"adapter\.lora\.{name}, but the checkpoints in .* resume with the same"):
            folder.begin(changed, "resume")
    folder.begin(alpha, "overwrite")


def test_a_run_that_replaces_another_or_leaves_its_course_has_another_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.identity == ("", "")
    seen = []
    keeps = replace(config(tmp_path), checkpoint=CheckpointConfig(pieces=PiecesConfig()))
    for how, step in (("new", None), ("resume", None), ("resume", 4), ("resume", None), ("overwrite", None)):
        folder.begin(keeps, how, step)
        seen.append(folder.identity)
        save(folder, 4) if not folder.place(4).exists() else None
    assert len({directory for directory, _ in seen}) == 1
    assert seen[0][0].startswith("run-")
    runs = [run for _, run in seen]
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    assert len({*runs}) == 3
    folder.begin(config(tmp_path), "resume")
    assert folder.identity[1] not in runs, "its checkpoints are not kept in pieces, which would then be old"


def test_a_run_that_leaves_its_course_forgets_what_happened_later(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config(tmp_path), "new")
    save(folder, 4)
    happened: list[tuple[int, Name, float]] = [(4, "fault", 0), (5, "fault", 0), (5, "resumed", 2)]
    happened += [(6, "saved", 1), (6, "resumed", 0)]
    events = [RunEvent(step, name, (1,), seconds, "") for step, name, seconds in happened]
    for event in events:
        append_event(folder.events, event)
    folder.begin(config(tmp_path), "resume")
    assert read_events(folder.events) == events
    folder.begin(config(tmp_path), "resume", 4)
    assert read_events(folder.events) == [events[0], *events[3:]]


def test_a_tracker_sees_a_run_that_continues_as_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.tracked == ""
    seen = []
    for how, step in (("new", None), ("resume", None), ("auto", None), ("resume", 4), ("overwrite", None)):
        folder.begin(config(tmp_path), how, step)
        seen.append(folder.tracked)
        save(folder, 4) if not folder.place(4).exists() else None
    assert seen[0] == seen[1] == seen[2] != ""
    assert len({*seen}) == 3, "a tracker would drop the rows of steps that it already has"


def test_new_runs_do_not_touch_old_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config(tmp_path), "new")
    save(folder, 4)
    with pytest.raises(ValueError, match="already holds a run: continue it with --resume, or replace it with"):
        folder.begin(config(tmp_path), "new")
    assert folder.last() is not None


def test_overwriting_keeps_data_and_strangers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config(tmp_path), "new")
    save(folder, 4)
    for path in (folder.path / "data" / "x", folder.path / "notes.txt", folder.model / "weights", folder.reference):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    folder.begin(config(tmp_path), "overwrite")
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.yaml", "data", "notes.txt", "owner.json"]
    assert folder.last() is None


@pytest.mark.parametrize("how", ["new", "overwrite", "auto", "resume"])
@pytest.mark.parametrize("name", ["config.yaml", "model/config.json", "checkpoints/notes.txt"])
def test_files_that_no_run_wrote_are_never_replaced(tmp_path: Path, name: str, how: Begin) -> None:
    own = tmp_path / "mine" / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(ValueError, match=f"has a {Path(name).parts[0]} that no run wrote: choose another output"):
        RunFolder(tmp_path / "mine").begin(config(tmp_path), how)
    assert own.read_text() == "mine"


def test_a_copy_of_a_run_s_checkpoints_resumes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "copy")
    save(folder, 4)
    assert folder.begin(config(tmp_path), "resume") is not None


@pytest.mark.parametrize(("saved", "sentence"), [(None, "no complete checkpoint"), (12, "past the last step")])
def test_refuses_to_resume_from_nothing_or_beyond_the_end(tmp_path: Path, saved: int | None, sentence: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config(tmp_path), "new")
    if saved is not None:
        save(folder, saved)
    with pytest.raises(ValueError, match=sentence):
        folder.begin(config(tmp_path), "resume")


def test_a_job_that_a_scheduler_starts_again_begins_once_and_then_continues(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.begin(config(tmp_path), "auto") is None
    folder.metrics.write_text("{}\n")  # of steps after which there was no checkpoint: they are done again
    folder.reference.write_text("scores")
    assert folder.begin(config(tmp_path), "auto") is None
    assert not folder.metrics.exists()
    assert folder.reference.exists()
    save(folder, 4)
    folder.metrics.write_text("{}\n")
    last = folder.begin(config(tmp_path), "auto")
    assert last is not None
    assert last.step == 4
    assert folder.metrics.exists()


def test_writes_the_resolved_config(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").begin(config(tmp_path), "new")
    assert TrainConfig.load(tmp_path / "run" / "config.yaml") == config(tmp_path)


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.owned(), pytest.raises(ValueError, match=r"in use by another run \(starting\)"), folder.owned():
        pass
    with folder.owned():
        folder.begin(config(tmp_path), "new")
        said = rf"is in use by another run \(process {os.getpid()} on {socket.gethostname()}\): stop that run"
        with pytest.raises(ValueError, match=said), folder.owned():
            pass
        with pytest.raises(ValueError, match="in use by another run"):
            folder.refuse_shared()
    folder.refuse_shared()
    with folder.owned():
        pass


def test_a_folder_is_taken_over_from_a_lost_rank_that_does_not_let_go_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with ExitStack() as lost, ExitStack() as ours:
        lost.enter_context(folder.owned())
        folder.begin(config(tmp_path), "new")
        ours.enter_context(folder.taken_over(0.0, folder.began))
        ours.enter_context(folder.taken_over(0.0, None))
        with (
            pytest.raises(ValueError, match="another run has started in this folder"),
            folder.taken_over(60.0, folder.began - 1),
        ):
            pass
        lost.close()
        while _free(folder):  # it is this run's as soon as the lost rank has ended
            time.sleep(0.01)
    folder.refuse_shared()
    folder.refuse_shared()


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_folder_that_was_removed_during_the_run_is_not_taken_over(tmp_path: Path, emptied: bool, known: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(config(tmp_path), "new")
    began = folder.began if known else None
    shutil.rmtree(folder.path)
    if emptied:
        folder.checkpoints.mkdir(parents=True)  # a checkpoint under way makes it again
    with pytest.raises(OSError, match=r"was deleted or emptied .* start the run again"), folder.taken_over(0.0, began):
        pass
    assert folder.path.exists() == emptied, "it is not made again"


def _free(folder: RunFolder) -> bool:
    try:
        folder.refuse_shared()
    except ValueError:
        return False
    return True


def test_looking_for_another_run_makes_no_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").refuse_shared()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("jump_s", [0.0, -86400.0, 86400.0])
def test_only_what_this_call_has_begun_goes_on_by_itself(
    tmp_path: Path, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    before = folder.began
    assert folder.again("new", before) == ("new", None)  # it failed before it had begun
    now = time.time() + jump_s  # the clock may be set between the call and the start of training
    monkeypatch.setattr(time, "time", lambda: now)
    folder.begin(config(tmp_path), "new")
    assert folder.again("overwrite", before) == ("auto", None), "scores of this run are kept"
    save(folder, 4)
    assert folder.again("new", before) == ("auto", None)
    assert folder.again("new", before, 4) == ("auto", None)
    later = folder.began
    assert folder.again("new", later) == ("new", None)  # that is another call's run
    assert folder.again("overwrite", later, 4) == ("overwrite", 4)
    folder.owner.write_text("{")
    assert folder.again("new", before) == ("new", None)

"""A run's folder: its files and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydragraph.checkpoint.folder import complete, set_aside, step_name
from hydragraph.checkpoint.manifest import is_whole
from hydragraph.data.atomic_write import write_whole
from hydragraph.train.config import TrainConfig
from hydragraph.train.config_overrides import differences
from hydragraph.train.stragglers.run_events import drop_events

Begin = Literal["new", "resume", "overwrite", "auto"]
_LOCK_POLL_S = 0.05


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int


class _FolderEntry:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    # Describes the process that holds the lock, and the run's start time
    owner = _FolderEntry("owner.json")
    # The resolved config
    config = _FolderEntry("config.yaml")
    metrics = _FolderEntry("metrics.jsonl")
    tensorboard = _FolderEntry("tensorboard")
    events = _FolderEntry("events.jsonl")
    ranks = _FolderEntry("ranks.json")
    # slow ranks (`straggler_file`)
    slow = _FolderEntry("slow.json")
    picture = _FolderEntry("loss.png")
    # trace for Perfetto
    trace = _FolderEntry("trace.json")
    # Written by `hydragraph compare`
    corrections = _FolderEntry("corrections.json")
    model = _FolderEntry("model")
    # tokenizer for transformers
    tokenizer = _FolderEntry("tokenizer")
    reference = _FolderEntry("reference.npz")
    checkpoints = _FolderEntry("checkpoints")

    def check(self, config: TrainConfig, how: Begin, step: int | None = None) -> Checkpoint | None:
        """Return the checkpoint that a run continues from, if any.

        Args:
            how: treatment of an earlier run: "new" (raise an error), "overwrite" (replace it), "resume" (continue it)
                or "auto" (continue it if it has a checkpoint, else replace it).

        Raises:
            ValueError: `how` does not suit the folder's contents.
            OSError: the folder is not writable.
        """
        self._refuse_unwritable()
        self._refuse_files_of_others()
        holds_run = self.metrics.exists() or self.checkpoints.exists()
        if how == "new" and holds_run:
            raise ValueError(
                f"output {self.path} already holds a run: continue it with --resume, or replace it with --overwrite"
            )
        last = self._chosen(step) if how in ("resume", "auto") else None
        if how == "resume" and last is None:
            way = (
                "replace the run with --overwrite"
                if holds_run
                else "set output to a run's folder, or leave --resume out to start a new run"
            )
            raise ValueError(f"output {self.path} holds no complete checkpoint to resume from: {way}")
        if last is not None and config.epochs is None and last.step > config.steps:
            raise ValueError(f"{last.path} is past the last step: set 'steps' to {last.step} or more")
        if last is not None:
            self._refuse_other_scaling(config)
        return last

    def begin(self, config: TrainConfig, how: Begin, step: int | None = None) -> Checkpoint | None:
        """Prepare the folder and write the resolved config; return the result of `check`.

        If `step` is given, later checkpoints are renamed and later events deleted.
        """
        last = self.check(config, how, step)
        if how == "overwrite":
            self.reference.unlink(missing_ok=True)
        if how == "overwrite" or (how == "auto" and last is None):
            self._clear()
        for checkpoint in self.all() if step is not None else ():
            if last is not None and checkpoint.step > last.step:
                set_aside(checkpoint.path, "later")
        if step is not None and last is not None:
            drop_events(self.events, last.step)
        self.path.mkdir(parents=True, exist_ok=True)
        directory, run = self.identity
        if last is None or step is not None or config.checkpoint.pieces is None:
            # Under a new name, earlier pieces are not read
            run = ""
        tracked = self.tracked if last is not None and step is None else ""
        record = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
        names = {"folder": directory or f"{self.path.absolute().name}-{_new_name()}", "run": run or _new_name()}
        names["tracked"] = tracked or _new_name()
        write_whole(self.owner, json.dumps(record | names))
        config.save(self.config)
        return last

    @property
    def identity(self) -> tuple[str, str]:
        """Unique names of the folder and its run; "": unset."""
        record = _read(self.owner)
        return str(record.get("folder", "")), str(record.get("run", ""))

    @property
    def tracked(self) -> str:
        """Name of the run in experiment trackers, kept if it continues from its last checkpoint."""
        return str(_read(self.owner).get("tracked", ""))

    @property
    def began(self) -> float:
        """Start time, in seconds since the epoch; 0 before any run."""
        return float(_read(self.owner).get("began", 0.0))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Lock the folder in a `with` block; raise ValueError if another run uses it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not _locked(lock):
                owner = _read(self.owner)
                holder = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "starting"
                raise ValueError(
                    f"output {self.path} is in use by another run ({holder}): stop that run, or choose another output"
                )
            yield
        finally:
            os.close(lock)

    @contextmanager
    def taken_over(self, patience_s: float, began: float | None) -> Iterator[None]:
        """Take over the folder's lock from a lost rank of the same run, in a `with` block.

        Args:
            patience_s: seconds to wait for the lock before continuing without it.

        Raises:
            OSError: the folder or its contents were removed.
            ValueError: another run has begun here.
        """
        self._refuse_another(began)
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        ended = threading.Event()
        waiting = threading.Thread(target=_lock, args=(lock, ended), name="hydragraph-folder", daemon=True)
        try:
            # A lost rank's process may still hold the lock. After the deadline, training continues,
            # and a thread takes the lock once it is free.
            deadline = time.monotonic() + patience_s
            while not _locked(lock):
                self._refuse_another(began)
                if time.monotonic() > deadline:
                    waiting.start()
                    break
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            ended.set()
            if waiting.ident is not None:
                waiting.join()
            os.close(lock)

    def _refuse_another(self, began: float | None) -> None:
        now = self.began
        if not now:
            raise OSError(
                f"output {self.path} was deleted or emptied during the run, and its config, metrics and checkpoints "
                "are lost: find out what deleted them, and start the run again"
            )
        if began not in (None, now):
            raise ValueError(f"output {self.path}: another run has started in this folder: choose another output")

    def refuse_shared(self) -> None:
        if self.path.is_dir():
            with self.owned():
                pass

    def again(self, how: Begin, before: float, step: int | None = None) -> tuple[Begin, int | None]:
        """Return `how` and `step` to restart an interrupted run.

        Args:
            how, step: arguments of the interrupted run, kept if it had not begun.
            before: value of `began` before the interrupted run started.
        """
        if self.began in (0.0, before):
            return how, step
        return "auto", None

    def place(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def last(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def last_whole(self) -> Checkpoint | None:
        """Return the latest checkpoint without missing or truncated files, or else the latest one."""
        whole = (checkpoint for checkpoint in reversed(self.all()) if is_whole(checkpoint.path))
        return next(whole, self.last())

    @property
    def how_to_go_on(self) -> str:
        if not self.path.is_dir():
            return f"{self.path} was deleted, with its checkpoints"
        last = self.last()
        if last is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint is {last.path}: continue with --resume"

    def replace_damaged(self, damaged: Checkpoint) -> Checkpoint | None:
        """If there is an earlier checkpoint, rename the damaged one and return the earlier one."""
        earlier = [place for place in self.all() if place.step < damaged.step]
        if not earlier:
            return None
        set_aside(damaged.path, "damaged")
        return earlier[-1]

    def changes(self, config: TrainConfig) -> str:
        before = self._last_config()
        return "" if before is None else ", ".join(differences(before, config))

    def chosen(self, step: int | None) -> Checkpoint:
        checkpoint = self._chosen(step)
        if checkpoint is None:
            raise ValueError(
                f"{self.path} holds no complete checkpoint: name the output folder of a run that saved one"
            )
        return checkpoint

    def all(self) -> list[Checkpoint]:
        return [Checkpoint(path, step) for step, path in complete(self.checkpoints)]

    def _chosen(self, step: int | None) -> Checkpoint | None:
        if step is None:
            return self.last()
        by_step = {checkpoint.step: checkpoint for checkpoint in self.all()}
        if step in by_step:
            return by_step[step]
        steps = ", ".join(f"step-{number}" for number in by_step) or "none"
        raise ValueError(f"output {self.path} holds no complete checkpoint of step {step} (complete: {steps})")

    def _last_config(self) -> TrainConfig | None:
        try:
            return TrainConfig.load(self.config)
        except (ValueError, OSError):
            return None

    def _refuse_other_scaling(self, config: TrainConfig) -> None:
        before = self._last_config()
        if before is None or before.adapter is None or config.adapter is None:
            return
        for name in ("alpha", "rslora"):
            saved, asked = (getattr(each.adapter.lora, name) for each in (before, config) if each.adapter is not None)
            if saved != asked:
                raise ValueError(
                    f"adapter.lora.{name} is {asked}, but the checkpoints in {self.path} were trained with {saved}: "
                    f"resume with the same {name}"
                )

    def _refuse_unwritable(self) -> None:
        there = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise ValueError(f"output {self.path}: {there} is not a directory: choose another output")
        if not os.access(there, os.W_OK | os.X_OK):
            raise OSError(f"output {self.path} cannot be written ({there} is read-only here): choose another output")

    def _refuse_files_of_others(self) -> None:
        if self.owner.exists() or self.last() is not None:
            return
        for path in (self.config, self.model, self.tokenizer, self.checkpoints, self.tensorboard, self.metrics):
            if path.exists():
                raise ValueError(f"output {self.path} has a {path.name} that no run wrote: choose another output")

    def _clear(self) -> None:
        for path in (self.checkpoints, self.tensorboard, self.model, self.tokenizer):
            shutil.rmtree(path, ignore_errors=True)
        files = (self.metrics, self.events, self.ranks, self.slow, self.picture, self.trace, self.corrections)
        for path in (*files, self.config):
            path.unlink(missing_ok=True)


def _new_name() -> str:
    return uuid.uuid4().hex[:8]


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, ended: threading.Event) -> None:
    with suppress(OSError):
        while not _locked(descriptor) and not ended.wait(_LOCK_POLL_S):
            pass


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}

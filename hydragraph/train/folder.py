"""A run's folder: where everything is, and how a run begins in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydragraph.runtime.checkpoint.folder import latest
from hydragraph.train.config import TrainConfig
from hydragraph.train.whole import write_whole

Begin = Literal["new", "resume", "overwrite"]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its directory.
        step: after which it was taken.
    """

    path: Path
    step: int


@dataclass(frozen=True)
class RunFolder:
    """The places in a run folder."""

    path: Path

    @property
    def owner(self) -> Path:
        """Whose run it is, and since when it has been that run's folder."""
        return self.path / "owner.json"

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """The metrics as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def picture(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def trace(self) -> Path:
        """When each rank ran each instruction, for Perfetto."""
        return self.path / "trace.json"

    @property
    def model(self) -> Path:
        """The final model, as transformers reads it."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The directory of all checkpoints."""
        return self.path / "checkpoints"

    def check(self, config: TrainConfig, how: Begin) -> Checkpoint | None:
        """Return the checkpoint that a run continues from, if any, without changing anything.

        Args:
            config: of the run.
            how: "new" refuses a folder that holds a run, "overwrite" replaces that run, "resume" continues it.

        Raises:
            ValueError: the folder holds a run although it should not, or none to continue.
        """
        holds_run = self.metrics.exists() or self.checkpoints.exists()
        if how == "new" and holds_run:
            raise ValueError(f"output {self.path} already holds a run: continue it with --resume, or use --overwrite")
        last = self.last() if how == "resume" else None
        if how == "resume" and last is None:
            raise ValueError(f"output {self.path} holds no complete checkpoint to resume from: use --overwrite")
        if last is not None and last.step > config.steps:
            raise ValueError(f"{last.path} is past the last step: set steps to {last.step} or more")
        return last

    def begin(self, config: TrainConfig, how: Begin) -> Checkpoint | None:
        """Make the folder ready for a run, write its resolved config, and return what `check` does."""
        last = self.check(config, how)
        if how == "overwrite":
            self._clear()
        self.path.mkdir(parents=True, exist_ok=True)
        config.save(self.config)
        write_whole(self.owner, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}))
        return last

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keep other runs out, for as long as this process lives at most.

        Raises:
            ValueError: another run is under way in the folder; it names its host and process.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            self.path, os.O_RDONLY | os.O_DIRECTORY
        )  # the folder itself, which a refused run leaves as it was
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read(self.owner)
                known = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "starting"
                raise ValueError(
                    f"output {self.path} belongs to a run that is under way ({known}): stop that one, or choose "
                    "another output"
                ) from None
            yield
        finally:
            os.close(lock)

    def refuse_shared(self) -> None:
        """Raise what `owned` does, and leave the folder as it is."""
        if self.path.is_dir():
            with self.owned():
                pass

    def again(self, how: Begin, since: float) -> Begin:
        """Return how a run that was interrupted begins again: at its last checkpoint, or at the start without any.

        Args:
            how: as it was to begin: so it does, if it was refused or ended before it had.
            since: when it was called, in seconds since the epoch: what began earlier is another run's.
        """
        if _read(self.owner).get("began", 0.0) < since:
            return how
        return "overwrite" if self.last() is None else "resume"

    def place(self, step: int) -> Path:
        """Return the directory of the checkpoint after a step."""
        return self.checkpoints / f"step-{step:08d}"

    def last(self) -> Checkpoint | None:
        """Return the latest complete checkpoint."""
        path = latest(self.checkpoints) if self.checkpoints.is_dir() else None
        return None if path is None else Checkpoint(path, int(path.name.removeprefix("step-")))

    def _clear(self) -> None:
        """Remove an earlier run, but neither cached data nor files that no run has written."""
        for path in (self.checkpoints, self.events, self.model):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.metrics, self.picture, self.trace, self.config):
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Return what a small JSON file holds; nothing where there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Checkpoints written by a background thread during training.

Training waits only while this rank's shards are copied to CPU memory (12 bytes per owned parameter with Adam). Before a
normal exit, Python waits for the writing thread, which is not a daemon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.folder import PathLike, removed_after_error
from hydragraph.cluster.agreement import together_own
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import World
from hydragraph.errors import RankFailure
from hydragraph.runtime.home_state import HomeState

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Saver:
    """Background writer of one rank's shards; all ranks must call its methods in the same order."""

    _world: World
    _timeout: timedelta
    _groups: Groups | None = None
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed and its error has not been raised yet."""
        return self._error is not None

    def start(
        self,
        path: PathLike,
        home: HomeState,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        groups: Groups,
    ) -> None:
        """Wait for an earlier save, copy the state and start writing."""
        self.wait()
        if self._groups is None:
            # In shared communicators, the thread's messages could meet those of a step.
            world = replace(self._world, backend="gloo")
            self._groups = Groups(world, self._timeout)
        prepared = save_and_load.prepare(path, home, optimizer, extra, groups)
        with removed_after_error(prepared.scratch, self._world.rank):
            # Copy now, because the next update changes the state.
            copied = together_own(groups, prepared.what, prepared.snapshot)
        self._thread = threading.Thread(target=self._write, args=(copied, self._groups), name="hydragraph-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the last save; if it failed, raise its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._groups is not None:
                self._groups.close()
                self._groups = None

    def _write(self, prepared: save_and_load.PendingCheckpoint, groups: Groups) -> None:
        try:
            if self._world.device.type == "cuda":
                # DCP's writer uses its thread's current GPU, by default GPU 0.
                torch.cuda.set_device(self._world.device)
            with self._world.calling(prepared.what):
                save_and_load.write(prepared, groups)
        except (ValueError, RankFailure) as error:
            self._error = error
        except OSError as error:
            # A full disk is neither a bug nor a rank failure
            _LOG.error("%s", error)
            self._error = error
        except Exception as error:
            failure = RankFailure(self._world.rank, prepared.what, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            _LOG.error("%s", failure)
            self._error = failure

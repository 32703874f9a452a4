"""Checkpoints that are written in a thread beside training.

Training waits for a copy of this rank's shards in CPU memory (12 bytes for each of its parameters with Adam, held
until they are written), not for the disk. The thread has communicators of its own: operations of two threads in one
would meet in another order on another rank. The checkpoint appears at its path once all ranks have written, so a crash
before that leaves what was there.

The thread is no daemon: a process that ends by itself waits for it, one that is killed does not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.folder import PathLike
from hydragraph.cluster.agreement import together_own
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import World
from hydragraph.errors import RankFailure
from hydragraph.runtime.home_state import HomeState

_LOG = logging.getLogger(__name__)


class Saver:
    """One rank's saves in the background, one at a time; all ranks call the same methods in the same order.

    Args:
        world: this process's place, from `join`; the saver makes communicators of its own.
        timeout: after how long an operation of these communicators fails.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        self._world = world
        self._timeout = timeout
        self._groups: Groups | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed that nobody has waited for; another rank may learn of it a little later."""
        return self._error is not None

    def start(
        self,
        path: PathLike,
        home: HomeState,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        groups: Groups,
    ) -> None:
        """Copy the state and begin to write it; arguments and errors as of `store.save`.

        Waits for an earlier save first.
        """
        self.wait()
        if self._groups is None:
            world = replace(self._world, backend="gloo")  # objects and names only
            self._groups = Groups(world, self._timeout, watch=self._world.watch)
        prepared = save_and_load.prepare(path, home, optimizer, extra, groups)
        try:
            copied = together_own(groups, prepared.what, prepared.snapshot)
        except BaseException:
            if self._world.rank == 0:
                prepared.discard()
            raise
        self._thread = threading.Thread(target=self._write, args=(copied, self._groups), name="hydragraph-save")
        self._thread.start()

    def wait(self) -> None:
        """Return once the last save is in its place.

        Raises:
            ValueError, OSError, RankFailure: it failed; on every rank, and only once. What was at its path is still
                there.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and drop the communicators; raises what `wait` does."""
        try:
            self.wait()
        finally:
            if self._groups is not None:
                self._groups.close()
                self._groups = None

    def _write(self, prepared: save_and_load.PendingCheckpoint, groups: Groups) -> None:
        """Write in the thread; an error is kept in the words that every rank uses."""
        try:
            with self._world.calling(prepared.what):
                save_and_load.write(prepared, groups)
        except (ValueError, RankFailure) as error:
            self._error = error
        except OSError as error:  # as of a save that training waits for: a full disk is no bug, and no rank's failure
            _LOG.error("%s", error)  # in case that nobody asks any more
            self._error = error
        except Exception as error:
            failure = RankFailure(self._world.rank, prepared.what, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            _LOG.error("%s", failure)  # in case that nobody asks any more
            self._error = failure

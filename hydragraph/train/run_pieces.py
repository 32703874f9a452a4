"""Checkpoints of a run in pieces (`checkpoint/state_pieces.py`)."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.launch import World
from hydragraph.cluster.shared_outcome import together
from hydragraph.train.config import TrainConfig
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.train_state import Run, TrainState

_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")


def check_places(config: TrainConfig) -> None:
    """Write and read a test file in each place for checkpoint pieces."""
    local = _local(config)
    shared = _shared(config)
    if local is not None:
        _try(f"checkpoint.pieces.local {local}", lambda: Pieces(memory=False, disk=local))
    if shared is not None:
        _try(f"checkpoint.pieces.shared {shared}", lambda: Pieces(memory=False, store=shared))


def _try(what: str, make: Callable[[], Pieces]) -> None:
    try:
        (shelf,) = make().shelves.values()
        # A recovery must be able to read the file.
        folder = f"probe-{uuid.uuid4().hex[:8]}"
        shelf.put(f"{folder}/probe", b"hydragraph")
        read = shelf.get(f"{folder}/probe")
        shelf.drop(folder)
    except ImportError as error:
        raise ValueError(f"{what}: {error}") from error
    except Exception as error:
        # fsspec's drivers raise various errors
        raise ValueError(
            f"{what}: a test file cannot be written ({type(error).__name__}: {error}): correct the path or credentials"
        ) from error
    if read != b"hydragraph":
        raise ValueError(f"{what}: a test file was read back with different contents: choose another place")


def open_pieces(config: TrainConfig, world: World, folder: RunFolder) -> Pieces | None:
    """Return this rank's places for pieces, if configured; all ranks must call this."""
    pieces = config.checkpoint.pieces
    if pieces is None:
        return None
    identity = together(world, "reading the run's identity", world.rank == 0, lambda: folder.identity)[0]
    assert identity is not None, "rank 0 reads the identity for all ranks"
    directory, run = identity
    local = _local(config)
    shared = _shared(config)
    return Pieces(
        memory=pieces.peers,
        disk=None if local is None else Path(local) / directory,
        store=None if shared is None else f"{shared.rstrip('/')}/{directory}",
        run=run,
    )


def keep_pieces(run: Run, state: TrainState) -> None:
    """Store the state as checkpoint pieces; all ranks must call this."""
    assert run.pieces is not None, "only a run with checkpoint.pieces calls this"
    extra = {"mini_batches": dict(state.positions[state.done]), "step": state.done}
    errors = run.executor.keep(run.pieces, extra)
    if errors and not state.pieces_fail and run.watcher is not None:
        run.watcher.note(f"the pieces of an earlier checkpoint are incomplete, but training continues: {errors[0]}")
    state.pieces_fail = bool(errors)


def _local(config: TrainConfig) -> str | None:
    pieces = config.checkpoint.pieces
    if pieces is None or pieces.local is None:
        return None
    expanded = os.path.expandvars(Path(pieces.local).expanduser())
    if unset := _VARIABLE.search(expanded):
        raise ValueError(
            f"checkpoint.pieces.local is {pieces.local!r}, but {unset[0]} is not set here: set the variable, or give a "
            "path without it"
        )
    return expanded


def _shared(config: TrainConfig) -> str | None:
    pieces = config.checkpoint.pieces
    if pieces is None or pieces.shared is None:
        return None
    return pieces.shared if "://" in pieces.shared else str(Path(pieces.shared).expanduser().absolute())

"""Checkpoints of all ranks' weights and optimizer state, which any number of ranks can load.

A checkpoint is a directory in the format of torch.distributed.checkpoint (DCP), with unsharded tensors: each parameter
under its name, and each elementwise optimizer state under `optimizer.{state}.{parameter}`. Another entry holds
hyperparameters, step counts and `extra`.

All ranks call `save` and `load` together; one rank's error is raised on all.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult

from hydragraph.checkpoint.dcp_planners import ShardedLoad, ShardedSave
from hydragraph.checkpoint.disk_errors import file_errors
from hydragraph.checkpoint.extra_entry import decoded, encoded, packed
from hydragraph.checkpoint.folder import PathLike, commit, make_scratch, removed_after_error, written_files
from hydragraph.checkpoint.manifest import (
    FORMAT,
    CheckpointManifest,
    check_buffers,
    check_files,
    check_model,
    read_manifest,
)
from hydragraph.checkpoint.metadata import CheckpointReader
from hydragraph.checkpoint.optimizer_state import (
    UnshardedState,
    allocated,
    check_groups,
    elementwise_states,
    kind_of,
    plain_state,
    restore,
    state_key,
)
from hydragraph.checkpoint.shared_directory import read_alike, same_copy, see
from hydragraph.cluster.agreement import together, together_own
from hydragraph.cluster.communicators import Groups
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.shard_boxes import OwnedBoxes, sharded, sharded_weights
from hydragraph.version import __version__

_LOG = logging.getLogger(__name__)

ENTRY = "hydragraph"
BUFFERS = "buffers"
MODEL = "model"


def save(
    path: PathLike, home: HomeState, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], groups: Groups
) -> None:
    """Save weights, optimizer and `extra`; `path` does not change until the checkpoint is complete.

    Args:
        path: a directory that all ranks share; replaced only if it is a checkpoint or empty.
        optimizer: None saves only weights.
        extra: numbers, strings, tensors and containers of these; only rank 0's are saved.

    Raises:
        ValueError: on all ranks, if `path` is unsuitable or a value cannot be stored.
        OSError: this rank cannot write to `path`.
        RankFailure: another rank failed while writing.
    """
    write(prepare(path, home, optimizer, extra, groups), groups)


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    path: Path
    scratch: Path
    contents: Mapping[str, OwnedBoxes | bytes]
    parameters: Mapping[str, tuple[int, ...]]
    optimizer: str | None

    def snapshot(self) -> PendingCheckpoint:
        copies = {n: v.copied() if isinstance(v, OwnedBoxes) else v for n, v in self.contents.items()}
        return replace(self, contents=copies)

    @property
    def what(self) -> str:
        return f"save checkpoint {self.path}"


def prepare(
    path: PathLike, home: HomeState, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], groups: Groups
) -> PendingCheckpoint:
    """Check that a checkpoint can be saved, and create a scratch directory.

    The result refers to the state, without a copy.
    """
    what = f"save checkpoint {path}"
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    rank = groups.world.rank
    # First, serialize all that can be refused, before a directory exists.
    parts = together(groups, what, lambda: encoded("the optimizer", plain_state(home, optimizer)))
    entry = together_own(groups, what, lambda: packed(extra, parts) if rank == 0 else b"")
    contents = together_own(
        groups, what, lambda: {**sharded_weights(home, once=True), **elementwise_states(home, optimizer)}
    )
    # Second, rank 0 creates the directory, and all ranks check that they see it.
    scratch = cast(Path, together(groups, what, lambda: make_scratch(path) if rank == 0 else None)[0])
    with removed_after_error(scratch, rank):
        together(groups, what, lambda: see(scratch, f"checkpoint {path}", rank))
    _LOG.info("began checkpoint %s", path)
    entries: dict[str, OwnedBoxes | bytes] = {**contents, **({ENTRY: entry} if rank == 0 else {})}
    return PendingCheckpoint(path, scratch, entries, shapes_of(home), kind_of(optimizer))


def write(prepared: PendingCheckpoint, groups: Groups) -> None:
    """Write a checkpoint and move it to its path; meanwhile, no other thread may use `groups`."""
    what = prepared.what
    rank = groups.world.rank
    scratch = prepared.scratch
    began = time.perf_counter()
    with removed_after_error(scratch, rank):
        # Each rank writes its shards and hashes its files. The manifest of all hashes comes last;
        # the rename makes the checkpoint visible at once.
        _write_entries(prepared, groups)
        files = {n: f for part in together(groups, what, lambda: written_files(scratch, rank)) for n, f in part.items()}
        versions = {"hydragraph": __version__, "torch": str(torch.__version__)}
        parameters = dict(prepared.parameters)
        manifest = CheckpointManifest(FORMAT, versions, groups.world.ranks, parameters, prepared.optimizer, files)

        def put_in_place() -> None:
            if rank == 0:
                with file_errors(scratch, prepared.path):
                    commit(prepared.path, scratch, manifest)

        together(groups, what, put_in_place)
        _LOG.info("wrote checkpoint %s in %.2f s", prepared.path, time.perf_counter() - began)


def load(
    path: PathLike,
    home: HomeState,
    optimizer: torch.optim.Optimizer | None,
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into weights and optimizer; no state changes before all files are checked.

    Args:
        path: a directory shared by all ranks, or copied to every host.
        optimizer: None loads only weights.
        buffers: persistent buffers, which saved buffers must match; None accepts any.

    Returns:
        The saved `extra`, on every rank.

    Raises:
        Damaged: a file is missing or has changed; other ranks may raise a plain ValueError.
        ValueError: on all ranks, if the checkpoint is missing, incomplete, or of another model or optimizer.
    """
    what = f"load checkpoint {path}"
    path = Path(path)
    # First, check files, model and optimizer before any state changes.
    manifest = read_alike(path, groups, what)
    check_files(path, manifest, groups, what, same_copy(path, groups, what))
    stored = (manifest.parameters, manifest.optimizer)
    together(groups, what, lambda: check_model(f"checkpoint {path}", *stored, shapes_of(home), kind_of(optimizer)))
    reader = CheckpointReader(path, manifest.files)
    metadata = together_own(groups, what, reader.read_metadata)
    states = together_own(groups, what, lambda: allocated(metadata, home) if optimizer else {})
    entry = together_own(groups, what, lambda: _read_entry(reader))
    extra: dict[str, Any] = entry["extra"]
    if buffers is not None:
        together(groups, what, lambda: check_buffers(f"checkpoint {path}", extra.get(BUFFERS), buffers))
    plain = UnshardedState(**entry["optimizer"]) if optimizer is not None else None
    if optimizer is not None and plain is not None:
        together(groups, what, lambda: check_groups(f"checkpoint {path}", home, optimizer, plain))
    # Second, read into weights and new optimizer states. From here on, an
    # error leaves weights partly loaded.
    contents: dict[str, OwnedBoxes | bytes] = {**sharded_weights(home)}
    for name, tensors in states.items():
        contents |= {state_key(state, name): sharded(home.pieces[name], t) for state, t in tensors.items()}
    together(groups, what, lambda: read_entries(contents, reader))
    if optimizer is not None and plain is not None:
        together(groups, what, lambda: restore(f"checkpoint {path}", home, optimizer, plain, states))
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    extra: dict[str, Any] = _read_entry(CheckpointReader(path, read_manifest(path).files))["extra"]
    return extra


def _read_entry(reader: CheckpointReader) -> dict[str, Any]:
    contents: dict[str, OwnedBoxes | bytes] = {ENTRY: b""}
    read_entries(contents, reader)
    entry: dict[str, Any] = decoded(cast(bytes, contents[ENTRY]))
    return entry


def _write_entries(prepared: PendingCheckpoint, groups: Groups) -> None:
    what = prepared.what
    leader = groups.world.rank == 0
    writer = FileSystemWriter(prepared.scratch, overwrite=False)
    planner = ShardedSave()

    def plan() -> SavePlan:
        planner.set_up_planner(dict(prepared.contents), writer.storage_meta(), leader)
        writer.set_up_storage_writer(leader)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> tuple[list[SavePlan], Metadata] | None:
        if not leader:
            return None
        plans, metadata = planner.create_global_plan(local)
        return writer.prepare_global_plan(plans), metadata

    def write_own() -> list[WriteResult]:
        with file_errors(prepared.scratch, prepared.path):
            return writer.write_data(planner.finish_plan(plans[groups.world.rank]), planner).wait()

    # DCP's protocol without its collectives: local plans, rank 0's global plan, all ranks' data,
    # then rank 0's index. `together` raises any rank's error on all ranks.
    local = together(groups, what, plan)
    plans, metadata = cast(tuple[list[SavePlan], Metadata], together(groups, what, plan_all)[0])
    results = together(groups, what, write_own)

    def finish() -> None:
        if leader:
            with file_errors(prepared.scratch, prepared.path):
                writer.finish(metadata, results)

    together(groups, what, finish)


def read_entries(contents: dict[str, OwnedBoxes | bytes], reader: CheckpointReader) -> None:
    """Read a checkpoint's entries into the boxes of `contents`, without communication."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp_load(contents, storage_reader=reader, planner=ShardedLoad(), no_dist=True)
    except CheckpointException as exception:
        error, _ = next(iter(exception.failures.values()))
        raise error from None


def shapes_of(home: HomeState) -> dict[str, tuple[int, ...]]:
    return {name: tuple(piece.parameter.shape) for name, piece in home.pieces.items()}

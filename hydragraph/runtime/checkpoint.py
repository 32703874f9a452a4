"""Checkpoints: the home state and the optimizer of all ranks, in a form that any number of ranks can load.

A checkpoint is a directory of torch.distributed.checkpoint (DCP): a tensor per parameter under its name, and one per
elementwise optimizer state under `optimizer.{state}.{parameter}`, each with its full natural shape, so that DCP's own
tools read it too. What is not sharded (hyperparameters, step counts, the caller's `extra`) is one entry beside them.
`complete.json` holds the SHA-256 of every file; a directory without it is no checkpoint.

All ranks call `save` and `load` together, and an error on one of them is an error on all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult

from hydragraph.errors import Unsupported
from hydragraph.runtime.agreement import Failure, raise_first, together, together_own
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.sharded import Sharded, sharded, sharded_weights
from hydragraph.runtime.state import HomeState

T = TypeVar("T")
PathLike = str | os.PathLike[str]

_FORMAT = 1
_MARKER = "complete.json"
_ENTRY = "hydragraph"  # the entry that is no tensor
_OPTIMIZER = "optimizer."
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-(\d+)\.(?:tmp|old)-[0-9a-f]{8}")


def save(
    path: PathLike,
    home: HomeState,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    groups: Groups,
) -> None:
    """Save weights, optimizer and `extra`; until everything is written, what was at `path` stays as it is.

    Args:
        path: a directory that all ranks see. A checkpoint there is replaced, anything else is refused.
        home, optimizer: this rank's; no optimizer: only weights are saved.
        extra: step number, data position, random states, ...: numbers, strings, tensors, and containers of them.
            Rank 0's is kept.
        groups: of all ranks.

    Raises:
        ValueError: on all ranks: `path` is something else, or something cannot be stored.
        RankFailure: another rank failed while writing; that rank raises its own error.
    """
    write(prepare(path, home, optimizer, extra, groups), groups)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What one rank is about to write, and where.

    Attributes:
        path: of the checkpoint.
        scratch: the directory to write into, which becomes the checkpoint once it is complete.
        contents: this rank's part of every entry.
        parameters: name -> natural shape.
        optimizer: class name.
    """

    path: Path
    scratch: Path
    contents: Mapping[str, Sharded | bytes]
    parameters: Mapping[str, tuple[int, ...]]
    optimizer: str | None

    def snapshot(self) -> Prepared:
        """Return the same with copies in CPU memory, so that training can go on while they are written."""
        copies = {n: v.copied() if isinstance(v, Sharded) else v for n, v in self.contents.items()}
        return replace(self, contents=copies)

    @property
    def what(self) -> str:
        """What is being done, for errors."""
        return f"save checkpoint {self.path}"

    def discard(self) -> None:
        """Remove what is written so far; rank 0 does it for all."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def prepare(
    path: PathLike,
    home: HomeState,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    groups: Groups,
) -> Prepared:
    """Check that a checkpoint can be saved and make room for it; all ranks call it, with the arguments of `save`.

    Returns:
        What `write` writes; its tensors are the state's own.
    """
    path, what, rank = Path(path), f"save checkpoint {path}", groups.world.rank
    parts = together(groups, what, lambda: _encoded("the optimizer", _plain(home, optimizer)))
    entry = together_own(groups, what, lambda: _packed(extra, parts) if rank == 0 else b"")
    contents = together_own(groups, what, lambda: {**sharded_weights(home), **_elementwise(home, optimizer)})
    scratch = cast(Path, together(groups, what, lambda: _scratch(path) if rank == 0 else None)[0])
    entries: dict[str, Sharded | bytes] = {**contents, **({_ENTRY: entry} if rank == 0 else {})}
    return Prepared(path, scratch, entries, _shapes(home), _kind(optimizer))


def write(prepared: Prepared, groups: Groups) -> None:
    """Write what `prepare` returned and put it in its place; all ranks call it, in any thread that owns the groups.

    Raises:
        ValueError, RankFailure: as for `save`; what was at the path stays as it was.
    """
    what, rank, scratch = prepared.what, groups.world.rank, prepared.scratch
    try:
        _write_entries(prepared, groups)
        files = {n: f for part in together(groups, what, lambda: _written(scratch, rank)) for n, f in part.items()}
        manifest = _Manifest(
            _FORMAT, _versions(), groups.world.ranks, dict(prepared.parameters), prepared.optimizer, files
        )
        together(groups, what, lambda: _commit(prepared.path, scratch, manifest) if rank == 0 else None)
    except BaseException:
        if rank == 0:
            prepared.discard()
        raise


def _write_entries(prepared: Prepared, groups: Groups) -> None:
    """Do what DCP's save does, step by step, over these groups: its own would use the default process group."""
    what, leader = prepared.what, groups.world.rank == 0
    writer, planner = FileSystemWriter(prepared.scratch, overwrite=False), _SavePlanner()

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
        try:
            return writer.write_data(planner.finish_plan(plans[groups.world.rank]), planner).wait()
        except OSError as error:
            if error.errno is not None and error.filename is None:  # a full disk's does not say where
                error.filename = str(prepared.path)
            raise

    local = together(groups, what, plan)
    plans, metadata = cast(tuple[list[SavePlan], Metadata], together(groups, what, plan_all)[0])
    results = together(groups, what, write_own)
    together(groups, what, lambda: writer.finish(metadata, results) if leader else None)


def load(path: PathLike, home: HomeState, optimizer: torch.optim.Optimizer | None, groups: Groups) -> dict[str, Any]:
    """Load a checkpoint, saved by any number of ranks, into this rank's weights and optimizer.

    Every file is checked before anything is changed. Hyperparameters (learning rates, ...) are restored too.

    Args:
        path: the checkpoint's directory, which all ranks see.
        home, optimizer: this rank's; no optimizer: only weights are loaded.
        groups: of all ranks.

    Returns:
        The `extra` it was saved with, on every rank.

    Raises:
        ValueError: on all ranks: no whole checkpoint is there, or it is of another model or optimizer.
    """
    path, what = Path(path), f"load checkpoint {path}"
    manifest = together(groups, what, lambda: _manifest(path))[0]
    _check_files(path, manifest, groups, what)
    together(groups, what, lambda: _check_model(path, manifest, home, optimizer))
    reader = FileSystemReader(path)
    states = together_own(groups, what, lambda: _allocated(reader.read_metadata(), home) if optimizer else {})
    contents: dict[str, Sharded | bytes] = {_ENTRY: b"", **sharded_weights(home)}
    for name, tensors in states.items():
        contents |= {_state_key(state, name): sharded(home.pieces[name], t) for state, t in tensors.items()}
    _run(dcp_load, groups, what, state_dict=contents, storage_reader=reader, planner=_LoadPlanner())
    entry = _decoded(cast(bytes, contents[_ENTRY]))
    if optimizer is not None:
        together(groups, what, lambda: _restore(path, home, optimizer, _Plain(**entry["optimizer"]), states))
    extra: dict[str, Any] = entry["extra"]
    return extra


def latest(directory: PathLike) -> Path | None:
    """Return the complete checkpoint `step-N` of the highest N in a directory; None where there is none."""
    found = _complete(Path(directory))
    return found[-1][1] if found else None


def prune(directory: PathLike, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints `step-N` of a directory, and what crashed saves left.

    Only one rank calls it, while no rank saves or loads there.

    Raises:
        ValueError: `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"prune {directory}: keep={keep}: keep at least one checkpoint")
    directory = Path(directory)
    found = _complete(directory)
    for _, path in found[:-keep]:
        _discard(path)
    for path in directory.iterdir() if found else ():
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is not None and int(leftover[1]) <= found[-1][0]:
            shutil.rmtree(path)


def _run(action: Callable[..., object], groups: Groups, what: str, **arguments: object) -> None:
    """Call DCP's load over all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what being alone means
            action(no_dist=groups.world.ranks == 1, **arguments)
    except CheckpointException as exception:
        raised = {rank: error for rank, (error, _) in exception.failures.items()}
        raise_first({r: Failure.of(e) for r, e in raised.items()}, raised.get(groups.world.rank), what)


def _chunks(value: Sharded) -> list[ChunkStorageMetadata]:
    """Return a tensor's boxes in DCP's words."""
    return [ChunkStorageMetadata(offsets, tensor.size()) for offsets, tensor in value.boxes.items()]


def _state_key(state: str, parameter: str) -> str:
    return f"{_OPTIMIZER}{state}.{parameter}"


class _SavePlanner(DefaultSavePlanner):
    """Writes the boxes of `Sharded` values, and bytes as they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """List what this rank writes."""
        self.plan = SavePlan([item for name, value in self.state_dict.items() for item in _write_items(name, value)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what an item writes."""
        value: Sharded | bytes = self.state_dict[write_item.index.fqn]
        if isinstance(value, bytes):
            return io.BytesIO(value)
        assert write_item.index.offset is not None
        return value.boxes[write_item.index.offset].contiguous()


def _write_items(name: str, value: Sharded | bytes) -> list[WriteItem]:
    if isinstance(value, bytes):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    properties = TensorProperties(dtype=value.dtype)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, value.shape),
        )
        for chunk in _chunks(value)
    ]


class _LoadPlanner(LoadPlanner):
    """Reads into the boxes of `Sharded` values whatever overlaps them, and bytes as they are."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take what to load, and what there is."""
        assert metadata is not None
        self._contents: dict[str, Sharded | bytes] = state_dict
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """List what this rank reads."""
        items: list[ReadItem] = []
        for name, value in self._contents.items():
            if isinstance(value, bytes):
                nothing, index = torch.Size((0,)), MetadataIndex(name)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
            else:
                stored = cast(TensorStorageMetadata, self._stored[name])
                items += create_read_items_for_chunk_list(name, stored, _chunks(value))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave every rank its own plan."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave this rank its own plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an entry that is no tensor."""
        self._contents[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return where an item's elements go."""
        value, offset = self._contents[read_item.dest_index.fqn], read_item.dest_index.offset
        assert isinstance(value, Sharded)
        assert offset is not None
        tensor = value.boxes[offset]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the elements are in place."""


# The optimizer.


@dataclass(frozen=True)
class _Plain:
    """What is not sharded of an optimizer.

    Attributes:
        groups: the names of each parameter group's parameters.
        hyperparameters: of each group.
        scalars: parameter -> state -> value; of a rank: only of parameters that it owns a part of, because an empty
            part need not have been stepped.
    """

    groups: list[list[str]]
    hyperparameters: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


def _kind(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__


def _group_names(home: HomeState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in home.parameters.items()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _places(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return which group each parameter is in."""
    return {name: place for place, names in enumerate(groups) for name in names}


def _plain(home: HomeState, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """Return the fields of this rank's `_Plain`."""
    if optimizer is None:
        return None
    unstored = ("params", "param_names")
    hyperparameters = [{k: v for k, v in g.items() if k not in unstored} for g in optimizer.param_groups]
    scalars: dict[str, dict[str, Any]] = {}
    for name, state, value in _states(home, optimizer):
        if not isinstance(value, Tensor) or value.dim() == 0:
            scalars.setdefault(name, {})[state] = value.detach().cpu() if isinstance(value, Tensor) else value
    return vars(_Plain(_group_names(home, optimizer), hyperparameters, scalars))


def _elementwise(home: HomeState, optimizer: torch.optim.Optimizer | None) -> dict[str, Sharded]:
    found = {}
    for name, state, value in _states(home, optimizer) if optimizer is not None else ():
        if isinstance(value, Tensor) and value.dim():
            found[_state_key(state, name)] = sharded(home.pieces[name], value)
    return found


def _states(home: HomeState, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, str, Any]]:
    """List (parameter, state, value) of every parameter that this rank owns a part of."""
    for name, parameter in home.parameters.items():
        for state, value in optimizer.state.get(parameter, {}).items() if parameter.numel() else ():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise Unsupported(
                    f"its state {state} has shape {tuple(value.shape)} for {parameter.numel()} elements",
                    where=f"optimizer {type(optimizer).__name__}, parameter {name}",
                    remedy="use an optimizer whose states are one value per element, or one per parameter",
                )
            yield name, state, value


def _packed(extra: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """Serialise everything that is no tensor, `parts` being what the ranks know of the optimizer."""
    for name, value in extra.items():
        _encoded(f"extra[{name!r}]", value)
    known = [_Plain(**fields) for part in parts if (fields := _decoded(part)) is not None]
    return _encoded("extra", {"extra": dict(extra), "optimizer": vars(_merged(known)) if known else None})


def _merged(parts: Sequence[_Plain]) -> _Plain:
    """Join what the ranks know: every parameter's scalars, which its owners have in common."""
    scalars: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for name, values in part.scalars.items():
            known = scalars.setdefault(name, values)
            if known.keys() != values.keys() or any(bool(known[k] != values[k]) for k in known):
                raise ValueError(
                    f"optimizer, parameter {name}: {values} on rank {rank} but {known} on an earlier rank: step the"
                    " optimizer on all ranks alike"
                )
    return _Plain(parts[0].groups, parts[0].hyperparameters, scalars)


def _encoded(what: str, value: object) -> bytes:
    """Serialise plain data, and see that it can be read back without running any code from the file."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _decoded(buffer.getvalue())
    except Exception as error:
        raise ValueError(
            f"checkpoint: {what} is not plain data ({type(error).__name__}): use numbers, strings, tensors, and lists,"
            " tuples and dictionaries of them; turn NumPy arrays into tensors"
        ) from error
    return buffer.getvalue()


def _decoded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _allocated(metadata: Metadata, home: HomeState) -> dict[str, dict[str, Tensor]]:
    """Make room for this rank's part of the stored elementwise states: parameter -> state -> 1-D tensor."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        state, _, name = key.removeprefix(_OPTIMIZER).partition(".")
        if isinstance(stored, TensorStorageMetadata) and key not in home.pieces and name in home.pieces:
            room = torch.empty_like(home.parameters[name], dtype=stored.properties.dtype, requires_grad=False)
            states.setdefault(name, {})[state] = room
    return states


def _restore(
    path: Path,
    home: HomeState,
    optimizer: torch.optim.Optimizer,
    plain: _Plain,
    states: Mapping[str, Mapping[str, Tensor]],
) -> None:
    groups = _group_names(home, optimizer)
    if [sorted(names) for names in groups] != [sorted(names) for names in plain.groups]:
        moved = _places(groups).items() ^ _places(plain.groups).items()
        raise ValueError(
            f"checkpoint {path}: its optimizer has {len(plain.groups)} parameter groups, this one {len(groups)}, which"
            f" differ in {sorted({name for name, _ in moved})[:3]}: build the optimizer with those it was saved with"
        )
    stepped = {name for name in home.pieces if states.get(name) or plain.scalars.get(name)}
    optimizer.load_state_dict(
        {
            "state": {name: {**plain.scalars.get(name, {}), **states.get(name, {})} for name in stepped},
            "param_groups": [
                {**values, "params": names} for values, names in zip(plain.hyperparameters, groups, strict=True)
            ],
        }
    )


# Files.


@dataclass(frozen=True)
class _File:
    """What a file must be."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> _File:
        with path.open("rb") as file:
            return _File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class _Manifest:
    """What `complete.json` says.

    Attributes:
        format: of the whole directory.
        versions: package -> version that saved it.
        ranks: how many saved it.
        parameters: name -> natural shape.
        optimizer: class name.
        files: name -> what it must be.
    """

    format: int
    versions: dict[str, str]
    ranks: int
    parameters: dict[str, tuple[int, ...]]
    optimizer: str | None
    files: dict[str, _File]


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("hydragraph")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"hydragraph": own, "torch": str(torch.__version__)}


def _manifest(path: Path) -> _Manifest:
    """Read the manifest of a complete checkpoint."""
    if not (path / _MARKER).is_file():
        aside = [str(p) for p in sorted(path.parent.glob(f"{path.name}.old-*")) if (p / _MARKER).is_file()]
        remedy = (
            f"rename {aside[0]}, which a crashed save moved aside" if aside else "name a directory that `save` made"
        )
        raise ValueError(f"checkpoint {path}: there is no {_MARKER}, so it is none or incomplete: {remedy}")
    try:
        content = json.loads((path / _MARKER).read_text())
        version = content["format"]
        if version == _FORMAT:
            content["parameters"] = {name: tuple(shape) for name, shape in content["parameters"].items()}
            content["files"] = {name: _File(**file) for name, file in content["files"].items()}
            return _Manifest(**content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"checkpoint {path}: {_MARKER} is damaged ({error}): load an earlier checkpoint") from error
    raise ValueError(
        f"checkpoint {path}: format {version}, but this version reads {_FORMAT}: install a newer hydragraph"
    )


def _check_files(path: Path, manifest: _Manifest, groups: Groups, what: str) -> None:
    """Hash all files, each rank a share of them."""
    mine = sorted(manifest.files)[groups.world.rank :: groups.world.ranks]
    found = together(groups, what, lambda: [text for n in mine if (text := _damage(path / n, manifest.files[n]))])
    damages = [text for part in found for text in part]
    if damages:
        raise ValueError(
            f"checkpoint {path}: {'; '.join(damages)}: restore it from a copy, or load an earlier checkpoint"
        )


def _damage(path: Path, expected: _File) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing, expected {expected.bytes} bytes with SHA-256 {expected.sha256}"
    found = _File.of(path)
    if found.bytes != expected.bytes:
        return f"{path.name} has {found.bytes} bytes, expected {expected.bytes}"
    if found.sha256 != expected.sha256:
        return f"{path.name} is corrupt: SHA-256 {found.sha256}, expected {expected.sha256}"
    return None


def _shapes(home: HomeState) -> dict[str, tuple[int, ...]]:
    return {name: piece.parameter.shape for name, piece in home.pieces.items()}


def _check_model(path: Path, manifest: _Manifest, home: HomeState, optimizer: torch.optim.Optimizer | None) -> None:
    shapes, stored = _shapes(home), manifest.parameters
    different = [
        f"{name} is {list(stored[name]) if name in stored else 'missing'} in the checkpoint and"
        f" {list(shapes[name]) if name in shapes else 'missing'} in the model"
        for name in (*stored, *(n for n in shapes if n not in stored))
        if stored.get(name) != shapes.get(name)
    ]
    if different:
        rest = f"; and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(f"checkpoint {path}: {'; '.join(different[:3])}{rest}: load it into the model that it is of")
    if optimizer is not None and manifest.optimizer != _kind(optimizer):
        raise ValueError(
            f"checkpoint {path}: it holds the state of {manifest.optimizer or 'no optimizer'}, not of"
            f" {_kind(optimizer)}: use the optimizer that it was saved with, or none to load weights alone"
        )


def _scratch(path: Path) -> Path:
    """Make the directory to write into, beside where the checkpoint will be, so that renaming it is enough."""
    if path.exists() and not (path / _MARKER).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"checkpoint {path}: something else is there, without {_MARKER}: choose another path or remove it"
        )
    scratch = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    scratch.mkdir(parents=True)
    return scratch


def _written(scratch: Path, rank: int) -> dict[str, _File]:
    """Hash the files that this rank wrote; DCP begins their names with the rank."""
    names = [*scratch.glob(f"__{rank}_*"), *([scratch / ".metadata"] if rank == 0 else ())]
    return {path.name: _File.of(path) for path in names}


def _commit(path: Path, scratch: Path, manifest: _Manifest) -> None:
    """Complete the checkpoint and put it in its place."""
    unseen = [name for name in manifest.files if not (scratch / name).is_file()]
    if unseen:
        raise ValueError(
            f"checkpoint {path}: rank 0 does not see {', '.join(unseen)}, which other ranks wrote: save to a directory"
            " that all ranks share"
        )
    with (scratch / _MARKER).open("w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(scratch)
    if path.exists():
        aside = _aside(path)
        path.rename(aside)
        try:
            scratch.rename(path)
        except BaseException:
            aside.rename(path)
            raise
        shutil.rmtree(aside)
    else:
        scratch.rename(path)
    _sync(path.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.old-{uuid.uuid4().hex[:8]}")


def _discard(path: Path) -> None:
    """Delete a checkpoint; what a crash leaves of it is never taken for a whole one."""
    shutil.rmtree(path.rename(_aside(path)))


def _sync(directory: Path) -> None:
    """Have the names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(directory: Path) -> list[tuple[int, Path]]:
    """List the complete checkpoints `step-N` as (N, path), ascending."""
    paths = directory.iterdir() if directory.is_dir() else ()
    named = [(match, path) for path in paths if (match := _STEP.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in named if (path / _MARKER).is_file())

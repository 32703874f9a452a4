"""A checkpoint's metadata: files written by PyTorch are read, and a forged file cannot run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save  # pyrefly: ignore[implicit-reexport]
from torch.distributed.checkpoint.metadata import Metadata

from hydragraph.checkpoint.manifest import Damaged
from hydragraph.checkpoint.metadata import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "c": b"bytes"}
    save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def reader(folder: Path) -> CheckpointReader:
    return CheckpointReader(folder, [path.name for path in folder.iterdir()])


def write(folder: Path, value: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value))


class Runs:
    """Pickled, it is a call."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def test_what_pytorch_wrote_is_read_as_pytorch_reads_it(saved: Path) -> None:
    found, expected = reader(saved).read_metadata(), FileSystemReader(saved).read_metadata()
    found.storage_meta.load_id = expected.storage_meta.load_id = None
    assert found == expected
    assert set(found.state_dict_metadata) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (os.system, r"posix\.system|nt\.system"),
        (eval, r"builtins\.eval"),
        (getattr, r"builtins\.getattr"),
        (torch.load, r"torch\.serialization\.load"),
        (torch.hub.load, r"torch\.hub\.load"),
        (FileSystemReader, r"torch\.distributed\.checkpoint\.filesystem\.FileSystemReader"),
    ],
)
def test_a_file_that_names_anything_else_runs_nothing(saved: Path, call: Any, name: str) -> None:
    mark = saved / "ran"
    argument = f"touch {mark}" if call is os.system else f"open({str(mark)!r}, 'w')"
    write(saved, Runs(call, argument))
    with pytest.raises(ValueError, match=rf"cannot be read .*the pickle names ({name}), which could run code"):
        reader(saved).read_metadata()
    assert not mark.exists()


def test_a_name_inside_plain_classes_is_found_too(saved: Path) -> None:
    metadata = FileSystemReader(saved).read_metadata()
    metadata.planner_data = [Runs(os.getcwd)]
    write(saved, metadata)
    with pytest.raises(ValueError, match="could run code"):
        reader(saved).read_metadata()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd", "sub/file"])
def test_files_elsewhere_are_refused(saved: Path, path: str) -> None:
    metadata = FileSystemReader(saved).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = path
    write(saved, metadata)
    with pytest.raises(ValueError, match="is not a file of this checkpoint"):
        reader(saved).read_metadata()


def test_a_file_that_nobody_has_checked_is_refused(saved: Path) -> None:
    with pytest.raises(Damaged, match=r"'__0_0\.distcp'.* is not a file of this checkpoint"):
        CheckpointReader(saved, [".metadata"]).read_metadata()


def test_damage_is_named(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    for data in (b"", whole[: len(whole) // 2], pickle.dumps([1])):
        (saved / ".metadata").write_bytes(data)
        with pytest.raises(ValueError, match=r"\.metadata .*: use another checkpoint"):
            reader(saved).read_metadata()
    write(saved, Metadata({}))
    assert reader(saved).read_metadata().state_dict_metadata == {}

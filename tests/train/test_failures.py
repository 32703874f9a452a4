"""`hydragraph train` when files are damaged or a disk is full: one sentence, and existing files are kept."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hydragraph.checkpoint import disk_errors
from tests.commands.tiny import computed, run, write
from tests.thorough import first, only, thorough

ONE = ["<tp1,pp1>"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and its run of six steps, with checkpoints after steps 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    result = run("train", write(folder, strategies=ONE))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The run folder, in a copy that may be damaged."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def again(trained: Path, folder: Path, *arguments: str) -> Any:
    return run("train", trained / "config.yaml", "--set", f"output={folder}", *arguments)


def curve(folder: Path) -> list[dict[str, Any]]:
    return [computed(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    """Return every file that a run leaves, by path, but its config and owner, which every call that begins writes."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("config.yaml", "owner.json")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@thorough
def test_a_truncated_token_file_is_named_and_deleting_it_helps(trained: Path, copied: Path) -> None:
    (tokens,) = (copied / "data").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-100])
    before = content(copied)
    result = again(trained, copied, "--resume", "--set", "steps=8")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"hydragraph: token file {tokens} is truncated or corrupt: expected ")
    assert result.stderr.endswith("; delete it and rerun\n")
    assert result.stderr.count("\n") == 1
    assert content(copied) == before
    tokens.unlink()
    result = again(trained, copied, "--resume", "--set", "steps=8")
    assert result.exit_code == 0, result.stderr
    assert curve(copied)[:6] == curve(trained / "run")
    assert len(curve(copied)) == 8


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_is_taken(trained: Path, copied: Path) -> None:
    last = copied / "checkpoints" / "step-00000006"
    (shard,) = last.glob("*.distcp")
    flip(shard)
    result = again(trained, copied, "--resume")
    assert result.exit_code == 0, result.stderr
    said = next(line for line in result.stderr.splitlines() if line.startswith("a DAMAGED checkpoint was renamed: "))
    assert f"checkpoint {last}: {shard.name} is corrupt: SHA-256 " in said
    assert said.endswith(f"trying {copied / 'checkpoints' / 'step-00000004'}")
    assert curve(copied) == curve(trained / "run")
    assert len(list(last.parent.glob("step-00000006.damaged-*"))) == 1


def test_a_checkpoint_that_was_asked_for_has_no_substitute(trained: Path, copied: Path) -> None:
    last = copied / "checkpoints" / "step-00000006"
    (last / ".metadata").unlink()
    before = content(copied)
    result = again(trained, copied, "--resume-from", "step-6")
    assert result.exit_code == 2
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"hydragraph: checkpoint {last}: .metadata is missing")
    assert sentence.endswith("restore it from a copy, or load an earlier checkpoint")
    assert content(copied) == before
    result = again(trained, copied, "--resume-from", "6th")
    assert result.exit_code == 2
    assert "--resume-from '6th': name a checkpoint by its step, such as step-40" in result.stderr


class Runs:
    """Pickled, it is a call."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@only("__0_0.distcp")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_forged_checkpoint_runs_nothing(file: str, trained: Path, copied: Path) -> None:
    last, mark = copied / "checkpoints" / "step-00000006", copied / "ran"
    if file == ".metadata":
        (last / file).write_bytes(pickle.dumps(Runs(f"touch {mark}")))
    else:  # which holds what torch.save wrote for each tensor, one after another, each as long as the metadata says
        forged = io.BytesIO()
        torch.save(Runs(f"touch {mark}"), forged)
        (last / file).write_bytes(forged.getvalue() + bytes(100000))
        metadata = pickle.loads((last / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(forged.getvalue())
        (last / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((last / "complete.json").read_text())  # which who forges a file forges too
    for name in manifest["files"]:
        data = (last / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (last / "complete.json").write_text(json.dumps(manifest))
    again(trained, copied, "--resume-from", "step-6", "--set", "steps=7")
    assert not mark.exists()
    assert not (copied / "checkpoints" / "step-00000007").exists()


@thorough
def test_checkpoints_beside_training_are_the_same(trained: Path, tmp_path: Path) -> None:
    result = again(trained, tmp_path / "run", "--set", "checkpoint.asynchronous=true")
    assert result.exit_code == 0, result.stderr
    assert curve(tmp_path / "run") == curve(trained / "run")
    found, expected = (content(each / "checkpoints") for each in (tmp_path / "run", trained / "run"))
    assert found.keys() == expected.keys()
    assert found["step-00000004/__0_0.distcp"] == expected["step-00000004/__0_0.distcp"]


@pytest.mark.parametrize(("asynchronous", "torch_tells"), first([(True, True)], product([False, True], [False, True])))
def test_a_full_disk_stops_the_run_and_it_resumes_from_the_last_checkpoint(
    asynchronous: bool, torch_tells: bool, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data, folder = dcp.FileSystemWriter.write_data, tmp_path / "run"
    calls: list[int] = []
    full: list[OSError] = []

    def fill(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and torch_tells:
            full.append(OSError(errno.ENOSPC, "No space left on device"))
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1408 vs 1302")
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_data(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fill)
    monkeypatch.setattr(disk_errors, "refusal", lambda directory: full.pop() if full else None)
    beside = ("--set", f"checkpoint.asynchronous={str(asynchronous).lower()}")
    result = again(trained, folder, *beside)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hydragraph: ")
    assert f"[Errno 28] No space left on device: '{folder / 'checkpoints' / 'step-00000004'}'" in last
    assert last.endswith(f"; the last checkpoint is {folder / 'checkpoints' / 'step-00000002'}: continue with --resume")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    resumed = again(trained, folder, *beside, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert curve(folder) == curve(trained / "run")

"""What one rank of a machine makes for the others: who makes it, what they read, and what happens when it fails."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.cluster import once_per_node
from hydragraph.cluster.launch import join, launch
from hydragraph.cluster.once_per_node import OfferedFile, once_per_machine
from hydragraph.engine import api
from hydragraph.errors import RankFailure, Unsupported
from hydragraph.passes.variants import Variants
from tests.models import llama, sequences
from tests.thorough import thorough

LIMIT = timedelta(minutes=2)
Found = tuple[Any, bool, list[str]]


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks write what they made: ours, so that we see what they leave behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def made_by(make: Callable[[int], object], *, keys: tuple[str, ...] = ("",) * 3) -> Found:
    """Return what this rank got, or the error it raised as text; whether it made it; and its warnings."""
    world = join("cpu")
    calls: list[int] = []
    warnings: list[str] = []

    def call() -> object:
        calls.append(world.rank)
        return make(world.rank)

    tempfile.tempdir = None  # look at TMPDIR again: the fork server has looked before
    with (
        world.calling("test"),
        mock.patch.object(once_per_node._LOG, "warning", lambda *said: warnings.append(said[0] % said[1:])),
    ):
        try:
            return once_per_machine(world, "a thing", keys[world.rank], call), bool(calls), warnings
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", bool(calls), warnings


def tensors(rank: int) -> dict[str, Tensor]:
    return {"values": torch.arange(5.0) + rank}


def shared() -> Found:
    return made_by(tensors)


def beside() -> tuple[bool, list[str]]:
    """Return whether this rank made it, and what it did instead."""
    world = join("cpu")
    did: list[str] = []
    with world.calling("test"):
        made = once_per_machine(world, "a thing", "", lambda: world.rank, lambda: did.append("something else"))
    return made == world.rank, did


def test_ranks_that_wait_do_something_else_meanwhile() -> None:
    assert launch(beside, 2) == [(False, ["something else"]), (True, [])]


def differing() -> Found:
    return made_by(tensors, keys=("a", "b", "a"))


def test_one_rank_makes_what_all_get_and_nothing_stays(room: Path) -> None:
    found = launch(shared, 3)
    assert [value["values"].tolist() for value, _, _ in found] == [[2.0, 3.0, 4.0, 5.0, 6.0]] * 3
    assert [made for _, made, _ in found] == [False, False, True]
    assert not any(warnings for _, _, warnings in found)
    assert not list(room.glob("hydragraph-*"))


def test_ranks_that_would_make_something_else_make_their_own() -> None:
    found = launch(differing, 3)
    assert [value["values"][0].item() for value, _, _ in found] == [2.0, 1.0, 2.0]
    assert [made for _, made, _ in found] == [False, True, True]


def refused() -> Found:
    def make(rank: int) -> object:
        raise Unsupported("a layer of glass", where="layer.3", remedy="use another")

    return made_by(make)


def broken() -> Found:
    def make(rank: int) -> object:
        raise KeyError("no such layer")

    return made_by(make)


def test_what_cannot_be_made_is_every_ranks_error() -> None:
    assert launch(refused, 3) == [
        ("Unsupported: layer.3: a layer of glass; use another", made, []) for made in (False, False, True)
    ]
    *others, last = launch(texts, 3)
    assert "KeyError" in last
    assert all(text == "RuntimeError: a thing on rank 2: KeyError: 'no such layer'" for text in others)


def texts() -> str:
    try:
        return str(broken()[0])
    except KeyError as error:
        return repr(error)


def dying() -> Found:
    def make(rank: int) -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    return made_by(make)


def test_a_rank_that_dies_making_it_ends_the_others_with_its_name(room: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 2.*SIGKILL"):
        launch(dying, 3, timeout=LIMIT)
    assert not list(room.glob("hydragraph-*"))


def unpicklable() -> Found:
    lock, made, warnings = made_by(lambda rank: (rank, threading.Lock()))
    return lock[0], made, warnings


def test_what_cannot_be_sent_is_made_by_each() -> None:
    found = launch(unpicklable, 2)
    assert [(value, made) for value, made, _ in found] == [(0, True), (1, True)]
    assert "because results cannot be sent" in found[1][2][0]


def tampered() -> Found:
    read = OfferedFile.read

    def other(self: OfferedFile) -> object:
        with open(self.path, "ab") as file:
            file.write(b"more")
        return read(self)

    with mock.patch.object(OfferedFile, "read", other):
        return made_by(tensors)


def test_a_file_that_is_not_what_was_written_is_not_read() -> None:
    found = launch(tampered, 2)
    assert [value["values"][0].item() for value, _, _ in found] == [0.0, 1.0]
    assert "has changed since it was written" in found[0][2][0]


def test_a_folder_of_others_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_bytes(b"")
    os.chmod(tmp_path, 0o755)
    with pytest.raises(PermissionError, match="not private to this user"):
        OfferedFile(str(path), "").read()


def trained(alone: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Train under two strategies; return losses, weights, and how many graphs this rank compiled."""
    compiled: list[object] = []
    compile_one = Variants._compile

    def counted(self: Variants, spec: Any, found: Any) -> Any:
        compiled.append(spec)
        return compile_one(self, spec, found)

    def own(world: object, what: str, key: str, make: Callable[[], Any], meanwhile: object) -> Any:
        return make()

    torch.manual_seed(0)
    model = llama(layers=2)
    strategies = [hg.Strategy.parse(text, layers=2) for text in ("<tp2,pp1>", "<[1,0]x2>")]
    with (
        mock.patch.object(Variants, "_compile", counted),
        mock.patch.object(api, "once_per_machine", own if alone else once_per_machine),
    ):
        exe = hg.compile(model, strategies, optimizer=torch.optim.AdamW, check="off")
        losses = [exe.step(sequences([9, 4, 6]), strategy=s).loss for s in strategies]
    return losses, exe.full_state_dict(), len(compiled)


@thorough
def test_what_another_rank_captured_and_compiled_trains_to_the_same_bits() -> None:
    theirs, ours = launch(trained, 2, True), launch(trained, 2, False)
    assert theirs[0][0] == ours[0][0] == ours[1][0]
    assert ours[0][1].keys() == theirs[0][1].keys()
    assert all(torch.equal(value, theirs[0][1][name]) for name, value in ours[0][1].items())
    assert ours[1][2] > 0
    assert ours[0][2] == 0

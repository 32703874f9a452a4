"""Failures of real processes in a small loop of chained and collective traffic: every survivor learns who and where."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.failure import rank_watch
from hydragraph.cluster.failure.failure_detector import FailureDetector
from hydragraph.cluster.failure.rank_watch import RankWatch
from hydragraph.cluster.launch import join, launch
from hydragraph.cluster.message_in_flight import Message
from hydragraph.cluster.processes import launched_ranks
from hydragraph.errors import RankFailure
from tests.thorough import first, only

RANKS = 4
# One step of rank r: 0 start an all-to-all, 1 receive from r - 1, 2 send to r + 1, 3 finish the all-to-all, 4 commit.
# Only ranks 0 to 2 are in the chain; rank 3 is idle until 3.
NAMES = ("pull", "receive", "send", "finish", "commit")
LIMIT_S = 10.0


def describe(rank: int, index: int, step: int = 0) -> str:
    return f"{NAMES[index]} of {rank}"


def run_step(groups: Groups, watch: RankWatch, hook: Callable[[int], None]) -> None:
    """The stand-in for the executor."""
    rank, ranks = groups.world.rank, groups.world.ranks
    inp, out = torch.ones(ranks * 1000), torch.empty(ranks * 1000)
    pull: Message | None = None
    hidden = torch.zeros(300_000)
    for index in range(len(NAMES)):
        watch.at(index)
        hook(index)
        with watch.communicating():
            if index == 0:
                pull = groups.all_to_all(Channel.PULL, out, inp, [1000] * ranks, [1000] * ranks)
            if index == 1 and 0 < rank < 3:
                groups.wait(groups.receive(hidden, rank - 1, 0))
            if index == 2 and rank < 2:
                groups.wait(groups.send(hidden + 1, rank + 1, 0))
            if index == 3:
                groups.wait(pull)
        if index == 4:
            groups.all_reduce(Channel.COMMIT, torch.ones(1))


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "vanish":  # as "kill", unseen by the launcher: connections close, the heartbeat ends
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    if connection.family == socket.AF_INET and not connection.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise KeyError("boom")
    if how == "runtime":
        raise RuntimeError("own mistake")


def loop(victim: int, at: int, how: str, folder: Path, stopped_s: float) -> None:
    """Three steps; in step 1 the victim misbehaves at an instruction. Survivors write what they saw."""
    world = join("cpu")
    watch = world.watch
    watch._judge = FailureDetector(stopped_s)
    groups = Groups(world, timedelta(seconds=120))
    began = 0.0

    def hook(index: int) -> None:
        if number == 1 and index == at and world.rank == victim:
            misbehave(how)

    try:
        for number in range(3):
            began = time.monotonic()
            with watch.step(number, describe):
                run_step(groups, watch, hook)
    except RankFailure as failure:
        seen: dict[str, Any] = {"number": number, "failure": [failure.rank, failure.instruction, failure.error]}
        seen["seconds"] = time.monotonic() - began
        seen["again"] = again(watch)
        groups.close()  # must not hang
        watch.close()
        (folder / f"{world.rank}.json").write_text(json.dumps(seen))
        raise


def again(watch: RankWatch) -> str:
    try:
        with watch.step(9):
            return "ran"
    except RankFailure as failure:
        return str(failure)


def check_survivors(folder: Path, victim: int, at: int, error: str, limit_s: float = LIMIT_S) -> None:
    """All but the victim raised the same failure, in time, and raise it again."""
    seen = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert sorted(seen) == [rank for rank in range(RANKS) if rank != victim]
    for one in seen.values():
        rank, instruction, text = one["failure"]
        assert (rank, instruction) == (victim, describe(victim, at))
        assert error in text
        assert "load the last checkpoint" in text
        assert one["again"] == str(RankFailure(rank, instruction, text))
        assert one["seconds"] < limit_s


# Rank 0 only sends, 1 receives and sends, 2 receives, 3 is uninvolved in the chain.
@only("1-0")
@pytest.mark.parametrize(("victim", "at"), first([(0, 2), (1, 0)], [(0, 2), (1, 0), (2, 1), (3, 3)]))
def test_a_killed_rank(victim: int, at: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="killed by signal 9") as caught:
        launch(loop, RANKS, victim, at, "kill", tmp_path, 60.0)
    assert (caught.value.rank, caught.value.instruction) == (victim, describe(victim, at))
    check_survivors(tmp_path, victim, at, "killed by signal 9")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less long for a stopped rank's own report, which never comes."""
    monkeypatch.setattr(launched_ranks, "_CULPRIT_S", 0.2)


@only("3-1-runtime")
@pytest.mark.parametrize(("victim", "at", "how"), [(1, 2, "raise"), (3, 1, "runtime"), (0, 4, "raise")])
def test_a_raising_rank(victim: int, at: int, how: str, tmp_path: Path) -> None:
    kind, text = (KeyError, "KeyError: 'boom'") if how == "raise" else (RuntimeError, "RuntimeError: own mistake")
    with pytest.raises(kind) as caught:
        launch(loop, RANKS, victim, at, how, tmp_path, 60.0)
    assert f"On rank {victim}:" in caught.value.__notes__[-1]
    check_survivors(tmp_path, victim, at, text)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"has been stopped for [01]\.\d s") as caught:
        launch(loop, RANKS, 2, 1, "stop", tmp_path, 0.9)
    assert (caught.value.rank, caught.value.instruction) == (2, "receive of 2")
    check_survivors(tmp_path, 2, 1, "has been stopped")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_nobody_saw_die_is_found_by_its_state(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"has been stopped for 1\.\d s") as caught:
        launch(loop, RANKS, 1, 2, "vanish", tmp_path, 60.0)
    assert (caught.value.rank, caught.value.instruction) == (1, "send of 1")
    check_survivors(tmp_path, 1, 2, "has been stopped")


def wrong_splits() -> str:
    """Rank 0 makes a mistake in a collective: its own error, though the executor marks it as communication."""
    world = join("cpu")
    watch = world.watch
    groups = Groups(world, timedelta(seconds=120))
    vars(rank_watch)["PATIENCE_S"] = 0.5  # nobody else is found to be the cause
    with watch.step(0, describe):
        watch.at(0)
        with watch.communicating():
            splits = [5, 5] if world.rank == 0 else [1, 1]
            work = groups.all_to_all(Channel.PULL, torch.empty(2), torch.ones(2), [1, 1], splits)
            groups.wait(work)
    return "ran"


def break_off(kind: str, folder: Path) -> None:
    """Rank 0 dies while rank 1 has received a part of a large message."""
    world = join("cpu")
    watch = world.watch
    groups = Groups(world, timedelta(seconds=120))
    size = 8 * 1024 * 1024
    inp, out = torch.ones(2 * size), torch.zeros(2 * size)
    dist.barrier()
    if world.rank == 0:
        threading.Thread(target=kill_when, args=(folder / "part",), daemon=True).start()
    else:
        threading.Thread(target=say_when, args=(folder / "part", out), daemon=True).start()
    try:
        with watch.step(0, describe):
            watch.at(0)
            for _ in range(1000):  # until it dies
                if kind == "all-to-all":
                    groups.wait(groups.all_to_all(Channel.PULL, out, inp, [size] * 2, [size] * 2))
                elif world.rank == 0:
                    groups.wait(groups.send(inp, 1, 0))
                else:
                    groups.wait(groups.receive(out, 0, 0))
    except RankFailure as failure:
        groups.close()
        (folder / "seen").write_text(f"{failure.rank} {failure.instruction}")
        raise


def kill_when(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def say_when(path: Path, out: torch.Tensor) -> None:
    while out[0] == 0:
        time.sleep(0.001)
    path.touch()


@only("point to point")
@pytest.mark.parametrize("kind", ["all-to-all", "point to point"])
def test_a_message_that_breaks_off(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="killed by signal 9"):
        launch(break_off, 2, kind, tmp_path)
    assert (tmp_path / "seen").read_text() == "0 pull of 0"


def test_a_mistake_in_a_collective_is_the_ranks_own_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)split") as caught:
        launch(wrong_splits, 2)
    assert not isinstance(caught.value, RankFailure)


def healthy() -> list[object]:
    """Two executables one after the other; connections of the user survive a fault."""
    world = join("cpu")
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[object] = []
    for _ in range(2):
        watch = join("cpu").watch
        groups = Groups(world, timedelta(seconds=120))
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        for number in range(3):
            with watch.step(number, describe):
                run_step(groups, watch, lambda _: None)
        with pytest.raises(RuntimeError, match=r"^plain$"), watch.communicating():
            raise RuntimeError("plain")  # outside of a step errors stay as they are
        watch.check()
        seen.append(watch.broken)
        dist.barrier()
        watch.report(ValueError("last"))
        seen.append(watch.broken)
        client.sendall(b"x")
        seen.append(server.recv(1))
        groups.close()
    return seen


def test_healthy_steps_and_what_a_fault_leaves_alone() -> None:
    assert launch(healthy, RANKS) == [[False, True, b"x"] * 2] * RANKS


def test_alone_errors_are_ones_own() -> None:
    watch = RankWatch(None, 0, 1)
    with watch.guarding(), watch.step(0):
        watch.at(3)
    with pytest.raises(RuntimeError, match=r"^plain$"), watch.step(1), watch.communicating():
        raise RuntimeError("plain")
    with pytest.raises(KeyError), watch.step(2):
        raise KeyError("boom")
    with watch.step(3):
        pass
    watch.close()

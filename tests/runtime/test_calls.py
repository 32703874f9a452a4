"""Every wait is watched, not only those of a step: what stops answering in any call ends all, who and where is said."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.failure_detector import FailureDetector
from hydragraph.cluster.failure.newest_watch import newest_watch
from hydragraph.cluster.launch import join
from hydragraph.cluster.message_in_flight import Message
from tests.models import sequences
from tests.ready import Ready, small_llama
from tests.thorough import first, thorough

RANKS = 3
STRATEGY = hg.Strategy.parse("<[0,1]x1s,[2]x1>", layers=2)
LIMIT = timedelta(seconds=100)  # against a hang
STOPPED_S = 1.0  # here; for users it is 6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process does")


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def batch() -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=0)


CALLS: dict[str, Callable[[hg.Executable, Path], object]] = {
    "save": lambda exe, folder: exe.save(folder / "c"),
    "save beside training": lambda exe, folder: (exe.save(folder / "c", asynchronous=True), exe.wait_saved()),
    "load": lambda exe, folder: exe.load(folder / "saved"),
    "full_state_dict": lambda exe, folder: exe.full_state_dict(),
    "save_pretrained": lambda exe, folder: exe.save_pretrained(folder / "hf"),
    "evaluate": lambda exe, folder: exe.evaluate(batch()),
    "gradients": lambda exe, folder: exe.gradients(batch()),
}


def misbehave(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exit":
        os._exit(7)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "raise":
        raise OSError("disk on fire")


@contextlib.contextmanager
def misbehaving(how: str, after: int) -> Iterator[None]:
    """Misbehave instead of waiting for others, after that many waits."""
    call, wait, left = Groups.call, Groups.wait, iter([False] * after + [True])

    def called(groups: Groups, function: Callable[[], object]) -> object:
        if next(left, False):
            misbehave(how)
        return call(groups, function)

    def waited(groups: Groups, message: Message | None) -> None:
        if next(left, False):
            misbehave(how)
        wait(groups, message)

    with mock.patch.object(Groups, "call", called), mock.patch.object(Groups, "wait", waited):
        yield


def judged_soon() -> None:
    watch = newest_watch()
    assert watch is not None
    watch._judge = FailureDetector(STOPPED_S)


def told(folder: Path, began: float, error: BaseException) -> None:
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error), time.monotonic() - began]))


def fail_in(ready: Ready, what: str, how: str, victim: int, after: int, folder: Path) -> None:
    judged_soon()
    exe = ready.executable(STRATEGY, adamw)
    exe.step(batch())
    exe.save(folder / "saved")
    began = time.monotonic()
    try:
        with misbehaving(how, after) if exe.rank == victim else contextlib.nullcontext():
            CALLS[what](exe, folder)
    except hg.RankFailure as error:
        told(folder, began, error)
        for again in (*CALLS.values(), lambda exe, _: exe.step(batch())):
            began = time.monotonic()
            with pytest.raises(hg.RankFailure, match=f"rank {victim} failed"):
                again(exe, folder)
            assert time.monotonic() - began < 2.0, "at once"
        exe.close()
        raise


@thorough
@pytest.mark.parametrize(
    ("what", "how", "after"),
    first(
        [("save beside training", "stop", 9), ("evaluate", "exit", 1), ("gradients", "interrupt", 1)],
        [
            ("save", "stop", 3),
            ("save beside training", "stop", 9),
            ("load", "stop", 2),
            ("full_state_dict", "stop", 1),
            ("evaluate", "exit", 1),
            ("save", "raise", 2),
            ("gradients", "interrupt", 1),
            ("save_pretrained", "stop", 1),
        ],
    ),
)
def test_a_rank_that_fails_in_any_call_is_named_by_all(what: str, how: str, after: int, tmp_path: Path) -> None:
    victim = 1
    expected = (hg.RankFailure, OSError) if how == "raise" else hg.RankFailure
    with pytest.raises(expected) as caught:
        hg.launch(fail_in, RANKS, small_llama(), what, how, victim, after, tmp_path, timeout=LIMIT)
    text = {"stop": "has been stopped for", "exit": "exited with code 7", "interrupt": "KeyboardInterrupt"}
    if how != "raise":
        assert isinstance(caught.value, hg.RankFailure)
        assert caught.value.rank == victim
    assert text.get(how, "disk on fire") in str(caught.value)
    for rank in {0, 2}:
        kind, message, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "RankFailure"
        assert message.startswith(f"rank {victim} failed"), message
        assert text.get(how, "disk on fire") in message, message
        assert seconds < 9.0


def compile_only(ready: Ready, victim: int, folder: Path) -> None:
    judged_soon()
    began = time.monotonic()
    try:
        with misbehaving("stop", 4) if dist.get_rank() == victim else contextlib.nullcontext():
            ready.executable(STRATEGY, adamw)
    except hg.RankFailure as error:
        told(folder, began, error)
        raise


def test_a_rank_that_is_stopped_while_ranks_agree_to_compile(tmp_path: Path) -> None:
    with pytest.raises(hg.RankFailure, match=r"rank 2 failed at `compile`: .*has been stopped for"):
        hg.launch(compile_only, RANKS, small_llama(), 2, tmp_path, timeout=LIMIT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


class Late:
    """An argument that stops its rank while it starts: before there is any watch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        if os.environ.get("RANK") == "1":
            (state["folder"] / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)


def nothing(_: Late) -> None:
    pass


@pytest.mark.thorough
def test_a_rank_that_is_stopped_before_it_has_joined(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(hg.RankFailure, match="rank 1 failed: its process has been stopped for"):
        hg.launch(nothing, RANKS, Late(tmp_path), timeout=LIMIT)
    assert (tmp_path / "stopped").exists()
    assert time.monotonic() - began < 20.0, "starting included"


def ends_early(ready: Ready) -> None:
    exe = ready.executable(STRATEGY, adamw)
    for _ in range(2 if exe.rank == 1 else 3):
        exe.step(batch())
    exe.close()
    time.sleep(30)


@thorough
def test_a_rank_whose_data_ends_early_is_named() -> None:
    early = "rank 1 failed at `close after step 2`: it closed its executable too early"
    with pytest.raises(hg.RankFailure, match=early):
        hg.launch(ends_early, RANKS, small_llama(), timeout=LIMIT)


# Slow is not dead.


def hold_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def slow(ready: Ready, seconds: float) -> float:
    judged_soon()
    exe = ready.executable(STRATEGY, adamw)
    if exe.rank == 1:
        hold_the_interpreter(seconds)
    loss = exe.step(batch()).loss
    if exe.rank == 2:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
    exe.evaluate(batch())
    exe.close()
    return loss


@thorough
def test_a_rank_that_holds_the_interpreter_is_no_failure() -> None:
    assert len(set(hg.launch(slow, RANKS, small_llama(), 3 * STOPPED_S, timeout=LIMIT))) == 1


def pids(folder: Path, ranks: int) -> list[int]:
    while True:
        found = [path.read_text() for path in folder.glob("*.pid")]
        if len(found) == ranks and all(found):
            return [int(pid) for pid in found]
        time.sleep(0.05)


def debugged(ready: Ready, folder: Path) -> float:
    judged_soon()
    exe = ready.executable(STRATEGY, adamw)
    (folder / f"{exe.rank}.pid").write_text(str(os.getpid()))
    loss, end = 0.0, time.monotonic() + 3 * STOPPED_S + 2.0
    while exe.groups.gather(time.monotonic() < end)[0]:
        loss = exe.evaluate(batch()).loss
    exe.close()
    return loss


def stop_all(folder: Path, seconds: float) -> None:
    found = pids(folder, RANKS)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for pid in found:
            os.kill(pid, sign)
        time.sleep(seconds)


@thorough
def test_a_debuggers_stop_of_all_ranks_is_no_failure(tmp_path: Path) -> None:
    from threading import Thread

    debugger = Thread(target=stop_all, args=(tmp_path, 3 * STOPPED_S))
    debugger.start()
    assert len(set(hg.launch(debugged, RANKS, small_llama(), tmp_path, timeout=LIMIT))) == 1
    debugger.join()


# Ranks that live but make no progress.


def endless(seconds: float) -> None:
    time.sleep(seconds)


def stand_still(ready: Ready, busy: bool, folder: Path) -> None:
    exe = ready.executable(STRATEGY, adamw, progress_s=2.0)
    descriptor = os.open(folder / f"{exe.rank}.stderr", os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 2)
    if exe.rank == 1:
        hold_the_interpreter(20.0) if busy else endless(20.0)
    exe.evaluate(batch())


@pytest.mark.parametrize("busy", first([True], [False, True]))
def test_a_rank_that_stands_still_is_named_with_every_ranks_stack(busy: bool, tmp_path: Path) -> None:
    with pytest.raises(hg.RankFailure, match=r"no rank has made progress for 2 s \(progress_s\)") as caught:
        hg.launch(stand_still, RANKS, small_llama(), busy, tmp_path, timeout=LIMIT)
    assert caught.value.rank == 1
    waiting, standing = ((tmp_path / f"{rank}.stderr").read_text() for rank in (0, 1))
    assert "rank 0 of 3" in waiting
    assert "evaluate" in waiting
    assert ("hold_the_interpreter" if busy else "endless") in standing


# What launch says.


def fail_in_start(how: str) -> int:
    world = join("cpu")
    if world.rank == 1:
        misbehave(how) if how != "exit status" else sys.exit(3)
    return sum(world.gather(1))


@pytest.mark.parametrize(("how", "text"), [("interrupt", "KeyboardInterrupt"), ("exit status", "SystemExit: 3")])
def test_what_ends_a_rank_is_that_ranks_failure(how: str, text: str) -> None:
    with pytest.raises(hg.RankFailure, match=f"rank 1 failed: {text}"):
        hg.launch(fail_in_start, RANKS, how, timeout=LIMIT)

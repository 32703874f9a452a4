"""What goes wrong in training, on real processes: every rank reports the same error, and whatever can continue does."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem

import hydragraph as hg
from hydragraph.ir.instruction import Instruction, Op
from tests.models import llama, sequences
from tests.ready import Ready, small_llama
from tests.thorough import first, only, thorough

LAYERS = 2
RANKS = 3
STRATEGY = "<[0,1]x1s,[2]x1>"  # a sequence-parallel stage of two ranks, then one of a single rank
OTHER = "<[2]x1,[1,0]x1>"
OFFLOADS = "<[0,1]x2so> + <[2]x2>"
LIMIT = timedelta(seconds=120)  # against a hang; a failure is noticed within 10 s of happening
REPORTS = "HYDRAGRAPH_TEST_REPORTS"

# Rank to kill at each kind of instruction: ranks 0 and 1 share a stage, 2 has the next one. Add a case with a kind.
VICTIMS = {
    Op.PULL: 2,
    Op.FORWARD: 1,
    Op.BACKWARD: 0,
    Op.SEND: 2,
    Op.RECEIVE: 0,
    Op.PUSH: 1,
    Op.FREE: 1,
    Op.COMMIT: 2,
    Op.UPDATE: 0,
    Op.OFFLOAD: 1,
    Op.FETCH: 0,
}
PRINTED = {Op.PULL: "link W.", Op.PUSH: "link G."}  # what the others print begins with their own name


def compiled(ready: Ready, text: str = STRATEGY) -> hg.Executable:
    strategy = hg.Strategy.parse(text, layers=LAYERS)
    return ready.executable(strategy, lambda named: torch.optim.AdamW(named, lr=1e-2))


def batch(seed: int = 0) -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=seed)


def before(exe: hg.Executable, wanted: Op, act: Callable[[], None]) -> None:
    """Call `act` right before this rank's next instruction of a kind, once."""

    def hook(instruction: Instruction) -> None:
        if instruction.op is wanted:
            exe._session.executor.before = None
            act()

    exe._session.executor.before = hook


def weights(exe: hg.Executable) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in exe.home.weights.items()}


def same(exe: hg.Executable, kept: dict[str, Tensor]) -> bool:
    return all(torch.equal(kept[name], weight) for name, weight in exe.home.weights.items())


def survive(exe: hg.Executable, steps: int) -> None:
    """Train until a step fails; write which it was, whether it changed weights, and the error."""
    for number in range(steps):
        kept = weights(exe)
        try:
            exe.step(batch(number))
        except (hg.RankFailure, torch.OutOfMemoryError) as error:
            Path(os.environ[REPORTS], str(exe.rank)).write_text(f"{number}|{same(exe, kept)}|{error}")
            raise


# A rank that dies.


def killed(ready: Ready, victim: int, op: Op) -> None:
    exe = compiled(ready, OFFLOADS if op in (Op.OFFLOAD, Op.FETCH) else STRATEGY)
    if exe.rank == victim:
        before(exe, op, lambda: os.kill(os.getpid(), signal.SIGKILL))
    survive(exe, 2)


def test_every_kind_of_instruction_has_a_victim() -> None:
    assert VICTIMS.keys() == set(Op)


@only("Op.PULL")
@pytest.mark.parametrize("op", first((Op.PULL, Op.PUSH, Op.UPDATE), Op))
def test_a_rank_killed_at_any_instruction_is_named_by_all(
    op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    victim = VICTIMS[op]
    with pytest.raises(hg.RankFailure, match=r"killed by signal 9") as caught:
        hg.launch(killed, RANKS, small_llama(), victim, op, timeout=LIMIT)
    assert caught.value.rank == victim
    for rank in {0, 1, 2} - {victim}:
        number, unchanged, message = (tmp_path / str(rank)).read_text().split("|", 2)
        assert number == ("1" if op is Op.UPDATE else "0")  # after the commit, others end the step without it
        assert unchanged == "True", f"rank {rank} updated its weights"
        assert message.startswith(f"rank {victim} failed at `"), message
        assert PRINTED.get(op, op.value) in message, message


# A rank that raises.


def out_of_memory(ready: Ready, victim: int) -> None:
    exe = compiled(ready)
    exe.step(batch())
    if exe.rank == victim:
        block = exe._session.preparer.get(*exe._ran[exe._communications]).blocks["layer.0"]
        block.variant.forward.forward = mock.Mock(side_effect=torch.OutOfMemoryError("tried to allocate 20.00 GiB"))
    survive(exe, 1)


def test_a_rank_without_memory_is_named_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    with pytest.raises(torch.OutOfMemoryError, match=r"20\.00 GiB"):
        hg.launch(out_of_memory, RANKS, small_llama(), 1, timeout=LIMIT)
    for rank in range(RANKS):
        _, unchanged, message = (tmp_path / str(rank)).read_text().split("|", 2)
        assert unchanged == "True"
        assert "tried to allocate 20.00 GiB" in message
        if rank != 1:
            assert message.startswith("rank 1 failed at `"), message
            assert "forward layer.0 [0]" in message
            assert "OutOfMemoryError: tried to allocate" in message


# Failures that a run survives.


def hold_the_interpreter() -> None:
    """Sleep without letting another thread run: the heartbeat pauses for longer than it may once something failed."""
    ctypes.PyDLL(None).usleep(1_900_000)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process write checkpoints to a device that is always full."""
    real = FileSystem.create_stream

    @contextmanager
    def full(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with real(self, "/dev/full" if "w" in mode else path, mode) as stream:
            yield stream

    with mock.patch.object(FileSystem, "create_stream", full):
        yield


def slowly(exe: hg.Executable) -> tuple[list[float], list[float]]:
    """Train the same steps twice from the same start, the second time with slow ranks."""
    start, losses = weights(exe), []
    slow: list[tuple[int, Op, Callable[[], None]]] = [
        (1, Op.FORWARD, lambda: time.sleep(2.8)),  # longer than anyone waits to learn who failed
        (2, Op.PUSH, hold_the_interpreter),
    ]
    for late in (False, True):
        for name, weight in exe.home.weights.items():
            weight.copy_(start[name])
        assert exe.optimizer is not None
        exe.optimizer.state.clear()
        for number, (rank, op, act) in enumerate(slow):
            if late and exe.rank == rank:
                before(exe, op, act)
            losses.append(exe.step(batch(number)).loss)
    return losses[:2], losses[2:]


def save_to_a_full_disk(exe: hg.Executable, folder: Path) -> tuple[list[str], bool, float]:
    """Save, fail to overwrite it and to save elsewhere, continue, and load the good checkpoint."""
    kept, errors = weights(exe), []
    exe.save(folder / "c", {"note": "whole"})
    exe.step(batch(2))
    for name in ("c", "d"):
        try:
            if exe.rank == 1:
                with full_disk():
                    exe.save(folder / name)
            else:
                exe.save(folder / name)
        except (OSError, hg.RankFailure) as error:
            errors.append(f"{type(error).__name__}: {error}")
    loss = exe.step(batch(3)).loss
    assert exe.load(folder / "c") == {"note": "whole"}
    whole = same(exe, kept)
    exe.step(batch(2))
    assert exe.step(batch(3)).loss == loss
    exe.save(folder / "d")
    return errors, whole, loss


def endure(ready: Ready, folder: Path) -> tuple[Any, Any]:
    exe = compiled(ready)
    found = slowly(exe), save_to_a_full_disk(exe, folder)
    exe.close()
    return found


@thorough
def test_slow_ranks_and_a_full_disk_end_nothing(tmp_path: Path) -> None:
    for rank, ((quick, late), (errors, whole, _)) in enumerate(
        hg.launch(endure, RANKS, small_llama(), tmp_path, timeout=LIMIT)
    ):
        assert quick == late
        assert whole
        assert len(errors) == 2
        for name, error in zip(("c", "d"), errors, strict=True):
            assert "No space left on device" in error
            if rank != 1:
                assert error.startswith(f"RankFailure: rank 1 failed at `save checkpoint {tmp_path / name}`"), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


# Ranks that do not do the same.


def differing(ready: Ready) -> list[str]:
    """Differ between ranks in several ways, one after another; return this rank's errors."""
    rank = dist.get_rank()
    strategy, other = (hg.Strategy.parse(text, layers=LAYERS) for text in (STRATEGY, OTHER))
    found: list[str] = []

    def tell(attempt: Callable[[], object]) -> None:
        try:
            attempt()
            found.append("no error")
        except ValueError as error:
            found.append(str(error))

    def meta() -> nn.Module:
        with torch.device("meta"):
            return llama(LAYERS)

    code = llama(LAYERS)
    if rank == 1:
        code.model.layers[1].mlp.act_fn = nn.GELU()
    tell(lambda: hg.compile(code, strategy))
    torch.manual_seed(rank // 2)
    tell(lambda: hg.compile(meta(), strategy))
    exe = compiled(ready)
    tell(lambda: exe.evaluate(batch(rank)))
    tell(lambda: exe.evaluate(batch(), other if rank == 2 else None))
    tell(lambda: exe.evaluate(batch()) if rank else exe.gradients(batch()))
    tell(lambda: exe.evaluate(batch()[: 3 + rank % 2]))
    tell(lambda: exe.evaluate(batch()))
    exe.close()
    return found


@thorough
def test_ranks_that_differ_are_told_before_anything_runs() -> None:
    by_rank = hg.launch(differing, RANKS, small_llama(), timeout=LIMIT)
    assert by_rank == [by_rank[0]] * RANKS
    code, seed, *calls, agreed = by_rank[0]
    assert code.startswith("ranks differ in program")
    assert "on ranks [1]" in code
    assert seed.startswith("ranks differ in random seed (torch.manual_seed)")
    differing_calls = ("ranks differ in mini-batch, strategy or call", "ranks differ in call")
    assert all(call.startswith(differing_calls) for call in calls)
    assert agreed == "no error"

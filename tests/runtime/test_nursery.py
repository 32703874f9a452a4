"""Ranks forked from a process that has prepared for them: what they inherit, and what happens when something fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hydragraph as hg
from hydragraph.errors import RankFailure
from hydragraph.runtime import nursery
from hydragraph.runtime.launch import launch
from hydragraph.runtime.variants import Variants
from tests.models import llama, sequences
from tests.runtime.test_launch import die, gone, pids

CALLS = "HYDRAGRAPH_TEST_CALLS"


def count() -> Callable[[int], int]:
    """Return what no pickle could carry, and note that this was called."""
    with Path(os.environ[CALLS]).open("a") as calls:
        calls.write("x")
    return lambda value: value + 1


def summed(prepared: Callable[[int], int], value: int) -> tuple[int, int, int]:
    total = torch.tensor([prepared(value) * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getppid()


def test_ranks_inherit_what_was_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLS, str(tmp_path / "calls"))
    found = launch(summed, 3, 4, prepare=count)
    assert [(rank, total) for rank, total, _ in found] == [(0, 30), (1, 30), (2, 30)]
    assert (tmp_path / "calls").read_text() == "x"
    (parent,) = {pid for _, _, pid in found}
    assert gone(parent)


def captured() -> tuple[torch.nn.Module, Variants]:
    model = llama(layers=2)
    variants = Variants(hg.capture(model), added=True)
    variants.compile([hg.Strategy.parse("<tp2,pp1>", layers=2)])
    return model, variants


def compiled(prepared: tuple[torch.nn.Module, Variants]) -> float:
    model, variants = prepared
    executable = hg.Executable(model, variants.program, hg.Strategy.parse("<tp2,pp1>", layers=2), None, None, "cpu")
    with mock.patch.object(Variants, "_compile", side_effect=AssertionError("it was compiled before")):
        loss = executable.evaluate(sequences([9, 4])).loss
    executable.close()
    return loss


def test_what_was_compiled_before_is_not_compiled_on_ranks() -> None:
    one, other = launch(compiled, 2, prepare=captured)
    assert one == other > 0


def nothing() -> None:
    pass


def boom() -> None:
    raise KeyError("boom")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="left over", daemon=True).start()


def asleep() -> None:
    time.sleep(600)


def run(prepared: None) -> None:
    raise AssertionError("no rank is to run")


@pytest.mark.parametrize(
    ("prepare", "error", "text"),
    [
        (boom, KeyError, "boom"),
        (killed, RuntimeError, "the process that ranks are forked from was killed by signal 9"),
        (left_a_thread, RuntimeError, "`left_a_thread` left threads, which ranks cannot inherit: left over; end them"),
    ],
    ids=["raises", "dies", "leaves a thread"],
)
def test_preparing_fails(prepare: Callable[[], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        launch(run, 2, prepare=prepare)


def test_preparing_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "_MORE_S", 1.0)
    with pytest.raises(TimeoutError, match="preparing had not ended after 2 s"):
        launch(run, 2, prepare=asleep, timeout=timedelta(seconds=1))


def slow() -> None:
    time.sleep(1.5)


def test_preparing_leaves_no_time() -> None:
    with pytest.raises(TimeoutError, match="preparing took all of the 1 s"):
        launch(run, 2, prepare=slow, timeout=timedelta(seconds=1))


def fail(prepared: None, culprit: int, how: str, folder: Path) -> None:
    if how == "raise":
        if dist.get_rank() == culprit:
            raise KeyError("boom")
        dist.all_reduce(torch.ones(1))
    die(culprit, how, folder)


def test_a_ranks_error_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="boom") as caught:
        launch(fail, 3, 1, "raise", tmp_path, prepare=nothing)
    assert "On rank 1:" in caught.value.__notes__[-1]


def test_a_dead_rank_is_named_and_no_process_remains(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="killed by signal 9") as caught:
        launch(fail, 3, 1, "kill", tmp_path, prepare=nothing)
    assert caught.value.rank == 1
    assert len(pids(tmp_path)) == 3
    assert all(gone(pid) for pid in pids(tmp_path))

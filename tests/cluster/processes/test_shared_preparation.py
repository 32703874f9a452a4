"""What a process prepares for ranks: what reaches them, and what happens when something fails."""

from __future__ import annotations

import gc
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
from hydragraph.cluster import launch as launching
from hydragraph.cluster.launch import join, launch
from hydragraph.cluster.processes.shared_preparation import left_of
from hydragraph.errors import RankFailure
from hydragraph.passes.variants import Variants
from tests.cluster.test_launch import die, gone, pids
from tests.models import llama, sequences
from tests.thorough import first, thorough

CALLS = "HYDRAGRAPH_TEST_CALLS"


def weights() -> dict[str, torch.Tensor]:
    """Return two names of one tensor, after a backward, and note that this was called, and where."""
    with Path(os.environ[CALLS]).open("a") as calls:
        calls.write(f"{os.getpid()} ")
    assert gc.get_freeze_count(), "garbage collection copies the server's memory"
    weight = torch.ones(4, requires_grad=True)
    (weight * 2).sum().backward()
    values = weight.detach() + 2
    return {"w": values, "tied": values}


def changed(prepared: dict[str, torch.Tensor], value: float) -> tuple[list[float], bool, list[float]]:
    """Change this rank's weights, check that their other name follows, and run a backward pass."""
    prepared["w"] += dist.get_rank() * value
    dist.barrier()
    tied = prepared["w"].data_ptr() == prepared["tied"].data_ptr()
    leaf = prepared["w"].clone().requires_grad_()
    (leaf**2).sum().backward()
    assert leaf.grad is not None
    return prepared["tied"].tolist(), tied, leaf.grad.tolist()


@pytest.mark.parametrize("method", first(["forkserver"], ["forkserver", "spawn"]))
def test_ranks_share_what_was_prepared_once_until_they_change_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "START_METHOD", method)
    monkeypatch.setenv(CALLS, str(tmp_path / "calls"))
    found = launch(changed, 2, 10.0, prepare=weights)
    assert [mine for mine, _, _ in found] == [[3.0] * 4, [13.0] * 4]
    assert all(tied for _, tied, _ in found)
    assert [gradient[0] for _, _, gradient in found] == [6.0, 26.0]
    (maker,) = (tmp_path / "calls").read_text().split()
    assert gone(int(maker))


def captured() -> tuple[torch.nn.Module, Variants]:
    model = llama(layers=2)
    variants = Variants(hg.capture(model), added=True)
    variants.compile([hg.Strategy.parse("<tp2,pp1>", layers=2)])
    return model, variants


def compiled(prepared: tuple[torch.nn.Module, Variants]) -> float:
    model, variants = prepared
    executable = hg.Executable(model, variants.program, hg.Strategy.parse("<tp2,pp1>", layers=2), None, join("cpu"))
    with mock.patch.object(Variants, "_compile", side_effect=AssertionError("it was compiled before")):
        loss = executable.evaluate(sequences([9, 4])).loss
    executable.close()
    return loss


@thorough
def test_what_was_compiled_before_is_not_compiled_on_ranks() -> None:
    one, other = launch(compiled, 2, prepare=captured)
    assert one == other > 0


def nothing() -> None:
    pass


def boom() -> None:
    raise KeyError("boom")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def a_lock() -> object:
    return threading.Lock()


def asleep() -> None:
    time.sleep(600)


def run(prepared: None) -> None:
    raise AssertionError("no rank is to run")


@pytest.mark.parametrize(
    ("prepare", "error", "text"),
    [
        (boom, KeyError, "boom"),
        (killed, RuntimeError, "the process that runs `prepare` failed: killed by signal 9"),
        (a_lock, ValueError, "the result of `prepare` cannot be sent to ranks .*lock"),
    ],
    ids=["raises", "dies", "returns a lock"],
)
def test_preparing_fails(prepare: Callable[[], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        launch(run, 2, prepare=prepare)


def test_preparing_takes_too_long() -> None:
    with pytest.raises(TimeoutError, match=r"`prepare` had not returned after 0\.3 s"):
        launch(run, 2, prepare=asleep, timeout=timedelta(seconds=0.3))


def test_preparing_leaves_no_time() -> None:
    with pytest.raises(TimeoutError, match="`prepare` used up the timeout of 1 s"):
        left_of(1.0, time.monotonic() - 2)


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

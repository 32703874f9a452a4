"""Training over communicators that behave as NCCL's: with real data, over real processes."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hydragraph as hg
from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.launch import join
from hydragraph.ir.instruction import Op, Stream
from hydragraph.passes import offload
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.strategy import Strategy
from tests.fake_nccl import Streams, fake_nccl
from tests.passes.test_pipeline import model
from tests.ready import Ready, small_llama
from tests.runtime.test_failures import REPORTS, batch, before, same, weights
from tests.thorough import first, thorough

TIMEOUT = timedelta(seconds=60)


def traffic() -> dict[str, Any]:
    with fake_nccl() as device:
        groups = Groups(join("cpu"), TIMEOUT)
        rank, peer = groups.world.rank, 1 - groups.world.rank
        (collectives,) = groups.tensor_parallel([(0, 1)]).values()
        groups.connect(rank_programs(model(4), Strategy.parse("<[0]x2,[1]x2>", 4), [2], ranks=2)[rank])
        connected = device.first_uses
        seen: dict[str, Any] = {"backend": groups.world.backend}
        device.entered = True
        with device:
            out = torch.empty(2)
            pulled = groups.all_to_all(Channel.PULL, out, torch.full((2,), float(rank)), [1, 1], [1, 1])
            with Streams(device).on(Stream.PUSH):  # which has not waited
                seen["unwaited"] = bool(torch.isnan(out).all())
            groups.wait(pulled)
            seen["waited"] = (out + 0).tolist()
            received = torch.empty(1)
            messages = [groups.receive(received, peer, 0), groups.send(torch.full((1,), 10.0 + rank), peer, 0)]
            for message in messages:
                groups.wait(message)
            seen["received"] = (received + 0).tolist()
            seen["summed"] = (collectives.all_reduce(torch.ones(2)) + 0).tolist()
            seen["on the host"] = groups.reduce_to_host(Channel.COMMIT, torch.ones(3)).tolist()
        seen["first uses during this"] = device.first_uses - connected
        groups.close()
        return seen


@thorough
def test_groups_connect_first_and_then_queue() -> None:
    for rank, seen in enumerate(hg.launch(traffic, 2, timeout=TIMEOUT)):
        assert seen == {
            "backend": "nccl",
            "unwaited": True,
            "waited": [0, 1],
            "received": [11.0 - rank],
            "summed": [2, 2],
            "on the host": [2, 2, 2],
            "first uses during this": 0,
        }


STRATEGY = "<[0,1]x1s,[2]x1>"
SERVING = "<[0]x1,[1]x1>"  # rank 2 only owns state


def trained(ready: Ready, text: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps; return the losses and all weights."""
    strategy = Strategy.parse(text, 2)
    exe = ready.executable(strategy, lambda named: hg.AdamW(named, lr=1e-2), max_grad_norm=1.0)
    losses = [exe.step(batch(number)).loss for number in range(2)]
    state = exe.full_state_dict()
    exe.close()
    return losses, state


def twice(ready: Ready, text: str) -> float:
    """Train over gloo and over this; return the largest difference of any weight."""
    with mock.patch.object(offload, "SMALL_BYTES", 0):
        expected, kept = trained(ready, text)
        with fake_nccl():
            losses, state = trained(ready, text)
    assert losses == pytest.approx(expected, rel=1e-6)
    return max((float((state[name] - kept[name]).abs().max()) for name in kept), default=0.0)


@thorough
@pytest.mark.parametrize("text", [SERVING, "<[0]x2o> + <[1]x1o,[2]x1>", "<[2]x1,[1,0]x1>"])
def test_training_is_the_same_as_over_gloo(text: str) -> None:
    assert max(hg.launch(twice, 3, small_llama(), text, timeout=TIMEOUT)) < 1e-5


def struck(ready: Ready, victim: int, op: Op) -> None:
    """Train over both, then until the victim kills itself; write how that step changed weights, and the error."""
    difference = twice(ready, STRATEGY)
    with fake_nccl():
        exe = ready.executable(Strategy.parse(STRATEGY, 2), lambda named: torch.optim.AdamW(named, lr=1e-2))
        streams = exe._session.executor.streams

        def end() -> None:
            if op is Op.COMMIT:
                streams.finish()  # its gradients have left, so the others wait for it in the commit itself
            os.kill(os.getpid(), signal.SIGKILL)

        if exe.rank == victim:
            before(exe, op, end)
        for number in range(2):
            kept = weights(exe)
            try:
                exe.step(batch(number))
            except hg.RankFailure as error:
                Path(os.environ[REPORTS], str(exe.rank)).write_text(f"{difference}|{same(exe, kept)}|{error}")
                raise


@pytest.mark.parametrize("op", first((Op.COMMIT,), (Op.PULL, Op.FORWARD, Op.RECEIVE, Op.PUSH, Op.COMMIT, Op.UPDATE)))
def test_training_is_the_same_and_a_lost_rank_ends_it_without_an_update(
    op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    with pytest.raises(hg.RankFailure, match="killed by signal 9"):
        hg.launch(struck, 3, small_llama(), 2, op, timeout=TIMEOUT)
    for rank in (0, 1):
        difference, unchanged, message = (tmp_path / str(rank)).read_text().split("|", 2)
        assert float(difference) < 1e-5
        assert unchanged == "True", f"rank {rank} updated its weights"
        assert message.startswith("rank 2 failed at `"), message


@thorough
def test_the_watchdog_of_pytorch_ends_ranks_that_set_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # PyTorch's default, which `join` replaces
    with pytest.raises(hg.RankFailure):
        hg.launch(struck, 3, small_llama(), 2, Op.PUSH, timeout=TIMEOUT)
    assert not list(tmp_path.iterdir()), "no rank survives to report"

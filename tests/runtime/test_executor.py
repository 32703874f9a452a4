"""The executor when things go wrong, over real gloo processes: no state is lost, and all ranks give the same error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hydragraph as hg
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.runtime.executor import Executor, square_sum
from tests.models import llama, sequences
from tests.own_models import small
from tests.ready import Ready, small_llama
from tests.thorough import only, thorough

LAYERS = 2
STRATEGY = "<[0,1]x1,[2]x1>"
LIMIT = timedelta(seconds=120)  # against a hang; a failure is noticed within 10 s of happening


def compiled(ready: Ready, max_grad_norm: float | None = None) -> hg.Executable:
    strategy = hg.Strategy.parse(STRATEGY, layers=LAYERS)
    return ready.executable(strategy, lambda named: torch.optim.AdamW(named, lr=1e-2), max_grad_norm=max_grad_norm)


def batch(seed: int = 0) -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=seed)


def at_instruction(exe: hg.Executable, wanted: Op, occurrence: int, act: Callable[[], None]) -> None:
    """Call `act` right when this rank is about to run the n-th instruction of a kind."""
    executor: Executor = exe._session.executor
    seen = [0]

    def hook(instruction: Instruction) -> None:
        if instruction.op is wanted:
            if seen[0] == occurrence:
                act()
            seen[0] += 1

    executor.before = hook


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _boom() -> None:
    raise ArithmeticError("boom")


def fail(ready: Ready, victim: int, op: Op, occurrence: int, how: str) -> tuple[bool, str]:
    """Train a step, then let one rank fail in the next; survivors return whether their weights changed, and why."""
    exe = compiled(ready)
    exe.step(batch(0))
    before = {n: w.clone() for n, w in exe.home.weights.items()}
    if exe.rank == victim:
        at_instruction(exe, op, occurrence, _kill if how == "kill" else _boom)
    try:
        exe.step(batch(1))
    except (hg.RankFailure, ArithmeticError) as error:
        changed = any(not torch.equal(before[n], w) for n, w in exe.home.weights.items())
        Path(os.environ["HYDRAGRAPH_TEST_REPORTS"], str(exe.rank)).write_text(f"{changed}|{error}")
        raise
    return False, "no failure"


@thorough
@pytest.mark.parametrize(
    ("victim", "op", "occurrence", "how", "text"),
    [
        (3, Op.PULL, 1, "kill", "link W."),  # it only owns a shard, without computing
        (1, Op.RECEIVE, 0, "raise", "receive"),
    ],
)
def test_a_failing_rank_is_named_by_all_and_nothing_is_updated(
    victim: int, op: Op, occurrence: int, how: str, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRAGRAPH_TEST_REPORTS", str(tmp_path))
    expected = hg.RankFailure if how == "kill" else ArithmeticError
    with pytest.raises(expected):
        hg.launch(fail, 4, small_llama(), victim, op, occurrence, how, timeout=LIMIT)
    survivors = [r for r in range(4) if r != victim]
    for rank in survivors:
        changed, _, message = (tmp_path / str(rank)).read_text().partition("|")
        assert changed == "False", f"rank {rank} updated its weights"
        assert message.startswith(f"rank {victim} failed"), message
        assert text in message, message


def not_finite(ready: Ready) -> tuple[str, bool, float]:
    exe = compiled(ready)
    exe.step(batch(0))
    healthy = {n: w.clone() for n, w in exe.home.weights.items()}
    name = next(n for n in exe.home.weights if n.startswith("layer"))
    if exe.rank == 1:
        exe.home.weights[name][0] = float("nan")
    try:
        exe.step(batch(1))
        message = "no error"
    except FloatingPointError as error:
        message = str(error)
    if exe.rank == 1:
        exe.home.weights[name].copy_(healthy[name])
    same = all(torch.equal(healthy[n], w) for n, w in exe.home.weights.items())
    loss = exe.evaluate(batch(1)).loss  # the executable is still usable
    exe.close()
    return message, same, loss


def test_a_loss_that_is_not_finite_updates_nothing_and_training_goes_on() -> None:
    for message, same, loss in hg.launch(not_finite, 3, small_llama(), timeout=LIMIT):
        assert "not finite, so nothing was updated" in message
        assert same
        assert loss == loss


def without_derivative(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(outputs[0], batch["labels"][0], ignore_index=-100, reduction="none")
    return (losses + (losses - losses).sqrt()).sum()


def test_a_finite_loss_with_a_gradient_of_nan_names_its_likely_cause() -> None:
    exe = hg.compile(small(layers=2), "<[0]x2>", torch.optim.SGD, loss=without_derivative, check="off", device="cpu")
    with pytest.raises(FloatingPointError, match="look for a square root, a division or a logarithm at 0"):
        exe.step(batch(0))
    exe.close()


def disagree(ready: Ready, what: str) -> None:
    rank = torch.distributed.get_rank()
    model = llama(LAYERS)
    if what == "weights" and rank == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    exe = replace(ready, model=model).executable(hg.Strategy.parse(STRATEGY, layers=LAYERS))
    data = batch(rank if what == "data" else 0)
    text = "<[0]x1,[1]x1>" if what == "strategy" and rank == 2 else STRATEGY
    exe.evaluate(data, strategy=hg.Strategy.parse(text, layers=LAYERS))


@only("weights")
@pytest.mark.parametrize("what", ["weights", "data", "strategy"])
def test_ranks_that_disagree_find_out_before_anything_runs(what: str) -> None:
    with pytest.raises(ValueError, match="ranks differ in"):
        hg.launch(disagree, 3, small_llama(), what, timeout=LIMIT)


def wrong_world(ready: Ready) -> None:
    compiled(ready)


def test_a_strategy_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(device|rank) 2"):
        hg.launch(wrong_world, 2, small_llama(), timeout=LIMIT)


def clipped(ready: Ready) -> tuple[list[float], list[float], dict[str, Tensor]]:
    exe = compiled(ready, max_grad_norm=np.float32(0.5))  # pyrefly: ignore[bad-argument-type]
    reports = [exe.step(batch(i)) for i in range(3)]
    weights = exe.full_state_dict()
    exe.close()
    return [r.loss for r in reports], [r.grad_norm for r in reports], weights


def twice(ready: Ready) -> tuple[list[str], int, int]:
    """Run the same steps twice from the same weights; also count what a switch of strategies compiles."""
    exe = compiled(ready)
    start = {n: w.clone() for n, w in exe.home.weights.items()}
    hashes = []
    other = hg.Strategy.parse("<[1]x2> + <[2]x1,[0]x1>", layers=LAYERS)
    for _ in range(2):
        for name, weight in exe.home.weights.items():
            weight.copy_(start[name])
        exe.optimizer.state.clear()
        losses = [exe.step(batch(i), strategy=s).loss for i, s in enumerate([exe.strategy, other, exe.strategy])]
        hashes.append(repr((losses, [w.double().sum().item() for w in exe.home.weights.values()])))
    known = len(exe._session.preparer._variants)
    exe.step(batch(7), strategy=other)
    found = len(exe._session.preparer._variants)
    exe.close()
    return hashes, known, found


@thorough
def test_the_same_steps_twice_give_the_same_bits_and_switching_compiles_nothing_again() -> None:
    for hashes, known, found in hg.launch(twice, 3, small_llama(), timeout=LIMIT):
        assert hashes[0] == hashes[1]
        assert known == found


@thorough
def test_gradients_are_clipped_by_the_global_norm() -> None:
    from tests import reference

    model = llama(LAYERS)
    wanted = reference.train(
        model, [batch(i) for i in range(3)], optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), clip=0.5
    )
    runs = hg.launch(clipped, 3, small_llama(), timeout=LIMIT)
    assert runs[0][0] == pytest.approx(wanted.losses, rel=1e-5)
    norms = [float(torch.stack([g.norm() for g in step.values()]).norm()) for step in wanted.gradients]
    assert runs[0][1] == pytest.approx(norms, rel=1e-4)


def test_the_sum_of_squares_is_exact_where_one_fp32_sum_is_not() -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    wanted = float(values.double().square().sum())
    assert abs(float(square_sum(values)) / wanted - 1) < 1e-6
    assert float(square_sum(values[:0])) == 0
    assert not torch.isfinite(square_sum(torch.tensor([1.0, float("nan")])))

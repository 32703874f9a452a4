"""Steps that were promised: the same numbers without a meeting before them; what a meeting refuses is refused."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.cluster.launch import join
from hydragraph.cluster.rendezvous.member import CALLED
from hydragraph.engine.session import RanksCompared, Session
from hydragraph.engine.step_agreement import AgreedStep, Inputs
from hydragraph.errors import RankFailure
from hydragraph.ir.instruction import Instruction, Op
from tests.models import sequences
from tests.own_models import small
from tests.ready import Ready, small_llama
from tests.thorough import thorough

RANKS = 3
STRATEGY = "<[0,1]x1s,[2]x1>"
OTHER = "<[2]x1,[1,0]x1>"
PAIR = "<[0]x1,[1]x1>"
STEPS = 4
LIMIT = timedelta(seconds=100)  # against a hang


def batch(step: int) -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=step)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def turn(step: int) -> str:
    return OTHER if step % 2 else STRATEGY


# Steps that are promised.


def train(ready: Ready, promises: bool) -> tuple[list[float], int]:
    """Return the losses, and how often ranks have met before a step."""
    exe = ready.executable(STRATEGY, adamw)
    losses = []
    coming = batch(0)
    with mock.patch.object(Session, "compare", autospec=True, side_effect=Session.compare) as compare:
        for step in range(STEPS):
            now, coming = coming, batch(step + 1)
            if promises and step + 1 < STEPS:
                exe.promise(coming, turn(step + 1))
            losses.append(exe.step(now, turn(step)).loss)
    return losses, compare.call_count


@thorough
def test_ranks_meet_before_the_first_step_alone_and_train_to_the_same_bits() -> None:
    ready = small_llama()
    met, counted = hg.launch(train, RANKS, ready, False, timeout=LIMIT)[0]
    assert counted == STEPS
    for losses, counted in hg.launch(train, RANKS, ready, True, timeout=LIMIT):
        assert (losses, counted) == (met, 1)


# Broken promises, each between correct steps.


def refusals(ready: Ready) -> list[float]:
    exe = ready.executable(PAIR, adamw)
    first = exe.rank == 0
    losses = []

    def step(given: list[Tensor]) -> None:
        losses.append(exe.step(given).loss)

    # One rank promises another batch, or none: ranks agree as without promises, and report the difference.
    for promised in (batch(9), None):
        if not first or promised is not None:
            exe.promise(promised if first else (coming := batch(1)))  # pyrefly: ignore[bad-argument-type]
        step(batch(0))
        if promised is None:
            step(batch(1))
        else:
            with pytest.raises(ValueError, match=r"ranks differ in mini-batch, strategy or call: .* on ranks \[0\]"):
                exe.step(promised if first else coming)
    # A promise goes for one call, also for one that is refused.
    coming = batch(1)
    exe.promise(coming)
    with pytest.raises(ValueError, match="no target token"):
        exe.step([])
    step(coming)
    exe.evaluate(batch(0))
    # All ranks promise an invalid batch; all refuse it and continue.
    wrong = [torch.tensor([1, -5])]
    exe.promise(wrong)
    step(batch(2))
    with pytest.raises(ValueError, match="sequence 0: input_ids is -5"):
        exe.step(wrong)
    # No other call comes in between; the step that was promised still does.
    coming = batch(3)
    exe.promise(coming)
    step(batch(2))
    for other in (lambda: exe.evaluate(batch(0)), exe.full_state_dict, lambda: exe.gradients(coming)):
        with pytest.raises(ValueError, match="the ranks agreed on the step given to `promise`; call `step` first"):
            other()
    step(coming)
    exe.evaluate(batch(0))
    # A change after the ranks agreed on the promised step is refused before the step updates weights.
    norm: Any = ready.model.norm
    group = exe.optimizer.param_groups[0]
    changes: list[tuple[Callable[[float], object], float]] = [
        (lambda to: group.update(lr=to), 1e-2),
        (lambda to: setattr(norm, "eps", to), norm.eps),
    ]
    for change, before in changes:
        coming = batch(3)
        exe.promise(coming)
        step(batch(2))
        if first:
            change(0.5)
        updates = exe.steps
        with pytest.raises(ValueError, match=r"ranks differ in optimizer's settings|norm: 'eps' was changed"):
            exe.step(coming)
        assert exe.steps == updates
        change(before)
    exe.evaluate(batch(0))
    return losses


def test_what_ranks_do_not_promise_alike_or_no_step_takes_is_refused_as_ever() -> None:
    by_rank = hg.launch(refusals, 2, Ready.of(small(2), [PAIR]), timeout=LIMIT)
    assert all(losses == by_rank[0] for losses in by_rank)
    assert len(by_rank[0]) == 9


def another(ready: Ready) -> str:
    exe = ready.executable(STRATEGY, adamw)
    coming = batch(1)
    exe.promise(coming)
    exe.step(batch(0))
    try:
        exe.step(batch(1) if exe.rank == 1 else coming)  # equal numbers, but not compared
    except RankFailure as failure:
        return f"{type(failure).__name__}: {failure}"
    except ValueError as error:
        exe.close()
        raise error
    return "trained"


@thorough
def test_a_rank_that_breaks_its_promise_fails_and_is_named() -> None:
    with pytest.raises(ValueError, match="the arguments differ from those of `promise`; pass"):
        hg.launch(another, RANKS, small_llama(), timeout=LIMIT)


def stops(ready: Ready, hears: bool) -> int:
    """Return how many steps there have been when ranks stop, which one asks for in step 2 at the latest."""
    exe = ready.executable(STRATEGY, adamw)
    if hears:  # while the step is under way
        exe.listens = lambda: 7 if exe.rank == 1 and exe.steps == 2 else 0
    coming = batch(0)
    for step in range(3):
        now, coming = coming, batch(step + 1)
        exe.promise(coming)
        if exe.rank == 1 and step == 2 and not hears:  # which ranks have promised already
            exe.stopping = 7
        exe.step(now)
    with pytest.raises(hg.Stopped):
        exe.step(coming)
    return exe.steps


@thorough
@pytest.mark.parametrize("hears", [False, True])
def test_a_request_to_stop_is_heard_at_the_end_of_the_step_that_was_promised(hears: bool) -> None:
    assert hg.launch(stops, RANKS, small_llama(), hears, timeout=LIMIT) == [3] * RANKS


def test_evaluations_and_scores_hear_a_request_to_stop() -> None:
    executable = hg.compile(small(), hg.Strategy.parse("<tp1,pp1>", 1), check="off", device="cpu")
    executable.listens = lambda: 7
    for call in (executable.evaluate, executable.score):
        with pytest.raises(hg.Stopped):
            call(batch(0))
    executable.listens = None
    assert executable.evaluate(batch(0)).tokens
    executable.close()


def killed(ready: Ready) -> str:
    """Lose a rank in its update, while the others are in the next step already, which has another program."""
    exe = ready.executable(STRATEGY, adamw)
    updates = count(1)

    def dying(instruction: Instruction) -> None:
        if instruction.op is Op.UPDATE and next(updates) == 3 and exe.rank == RANKS - 1:
            time.sleep(0.5)  # until the others are in the next step
            os.kill(os.getpid(), signal.SIGKILL)

    exe._session.executor.before = dying
    coming = batch(0)
    for step in range(4):
        now, coming = coming, batch(step + 1)
        exe.promise(coming, turn(step + 1))
        try:
            exe.step(now, turn(step))
        except RankFailure as failure:
            return failure.instruction
    return "nobody was lost"


@thorough
def test_where_a_rank_was_lost_is_told_by_the_program_of_its_own_step() -> None:
    with pytest.raises(RankFailure) as lost:
        hg.launch(killed, RANKS, small_llama(), timeout=LIMIT)
    assert lost.value.instruction.split() == ["compute", "update"]


def freed(ready: Ready) -> bool:
    exe = ready.executable(STRATEGY, adamw)
    exe.promise(coming := batch(1))
    exe.step(batch(0))
    exe.step(coming)
    exe.close()
    gc.collect()
    gc.disable()
    gone = weakref.ref(exe)
    del exe
    return gone() is None


@thorough
def test_an_executable_that_nobody_has_any_more_is_gone_at_once() -> None:
    assert all(hg.launch(freed, RANKS, small_llama(), timeout=LIMIT))


def grows(ready: Ready) -> int:
    """Let a step fail that has promised another; the next one meets."""
    exe = ready.executable(STRATEGY, lambda named: torch.optim.SGD(named, lr=1e30))
    coming = batch(1)
    exe.promise(coming)
    exe.step(batch(0))
    exe.promise(batch(2))
    with pytest.raises(FloatingPointError):
        exe.step(coming)
    exe.full_state_dict()  # which a promise would refuse
    return exe.steps


@thorough
def test_a_step_that_updates_nothing_promises_nothing() -> None:
    assert hg.launch(grows, RANKS, small_llama(), timeout=LIMIT) == [1] * RANKS


def alone(ready: Ready) -> list[float]:
    exe = ready.executable("<tp1,pp1>", adamw)
    losses = []
    for step in range(3):
        exe.promise(batch(step + 1))
        losses.append(exe.step(batch(step)).loss)  # another object: a single rank need not keep promises
    assert exe.rank == join("cpu").rank
    return losses


def test_one_rank_promises_nothing() -> None:
    assert len(alone(small_llama())) == 3


# Numbers that ranks exchange at a commit.


def says(digest: int, stopping: int = 0, failed: bool = False) -> tuple[int, ...]:
    session = mock.Mock(saver=mock.Mock(failed=failed))
    return Session.saying(session, digest, stopping)


@pytest.mark.parametrize("digest", [0, 1, 2**31 - 1, 2**31, 2**62 - 1])
def test_what_is_said_fits_the_numbers_that_carry_it_and_is_read_back(digest: int) -> None:
    said = [says(digest), says(digest, stopping=CALLED), says(digest, failed=True)]
    assert all(int(float(number)) == number for numbers in said for number in numbers)
    assert RanksCompared.of(said) == RanksCompared(True, True, CALLED)
    for other in (digest ^ 1, digest ^ (1 << 61), -1):
        assert not RanksCompared.of([*said, says(other)]).same
    assert not RanksCompared.of([says(-1)] * 3).same, "no rank has made a promise"


def test_a_promise_is_of_the_very_object_and_strategy() -> None:
    given = batch(0)
    inputs = Inputs(given, STRATEGY)
    assert inputs.same_as(Inputs(given, STRATEGY))
    assert not inputs.same_as(Inputs(batch(0), STRATEGY))
    assert not inputs.same_as(Inputs(given, OTHER))
    promise = AgreedStep(inputs)
    assert promise.heard([says(3)] * 2)
    assert not promise.heard([says(3), says(4)])

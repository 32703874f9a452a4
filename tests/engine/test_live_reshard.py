"""State moves to other owners during a step: with the same bits as a move after it, whichever rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.engine.live_reshard import LiveReshard
from hydragraph.engine.session import Session
from tests.engine.test_state_transfer import (
    CLIP,
    LIMIT,
    RANKS,
    TWICE,
    StruckError,
    adamw,
    batch,
    compiled,
    parsed,
    partly_frozen,
    stop,
    train,
)
from tests.engine.test_state_transfer import WIDE as STRATEGY
from tests.generations import regroup
from tests.ready import Ready
from tests.thorough import thorough

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

EXACT = "2*<tp1,pp2>"  # in deterministic mode
STREAMED = "<[0]x1w,[1]x1> + <[2]x1g,[3]x1w>"

# Homes in turn; the state moves to the next one during each step.
ONE = [hg.Home(), hg.Home([1, 0, 2, 5]), hg.Home([0, 3, 1, 1], buckets={"layer.0": [0, 0, 0, 1]}), hg.Home()]
TWO = [TWICE, hg.Home([1, 0.5, 2, 5], copies=2), hg.Home([1, 3, 0, 1], copies=2), hg.Home([2, 0, 0, 1]), TWICE]


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True)


def ours(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return hg.AdamW(named, lr=1e-2)


Seen = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def prepared() -> Ready:
    return Ready.of(partly_frozen(), [STRATEGY])


def along(prepared: Ready, way: Sequence[hg.Home], optimizer: Factory, beside: bool, text: str) -> Seen:
    """Train a step under each home, the first before any optimizer has a state; return losses and weights."""
    exe = prepared.executable(parsed(text), optimizer, home=way[0], max_grad_norm=CLIP, deterministic=text == EXACT)
    own = exe.optimizer
    losses = []
    for number, home in enumerate(way[1:]):
        if beside:
            exe.rehome(home)
            exe.evaluate(batch(99))
        for group in exe.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)  # after state has set out
        losses += train(exe, [number])
        if not beside:
            exe.move(exe.world, home, range(RANKS))
        assert (exe.owners.shares, exe.owners.buckets) == (home.shares, home.buckets)
        assert exe.optimizer is own, "schedulers hold on to it"
    losses += train(exe, [len(losses), len(losses) + 1])
    state = exe.full_state_dict()
    exe.close()
    return losses, state


def both(prepared: Ready, cases: Sequence[tuple[Sequence[hg.Home], Factory, str]]) -> list[tuple[Seen, Seen]]:
    return [(along(prepared, *case[:2], True, case[2]), along(prepared, *case[:2], False, case[2])) for case in cases]


@thorough
def test_training_goes_on_as_if_state_had_moved_behind_the_step(prepared: Ready) -> None:
    check_along(prepared, [(ONE[1:3], adamw, STRATEGY), (TWO[:2], momentum, EXACT)])


@thorough
def test_our_own_optimizers_states_move_beside_the_step_too(prepared: Ready) -> None:
    check_along(prepared, [(TWO[1:], ours, STRATEGY)])


@thorough
def test_state_moves_beside_a_step_of_stages_that_stream(prepared: Ready) -> None:
    check_along(prepared, [(ONE[1:3], adamw, STREAMED)])


def check_along(prepared: Ready, cases: list[tuple[Sequence[hg.Home], Factory, str]]) -> None:
    for (losses, state), (expected, after) in hg.launch(both, RANKS, prepared, cases, timeout=LIMIT)[0]:
        assert losses == expected
        assert all(torch.equal(state[name], after[name]) for name in after)


# Ranks that are lost meanwhile.

MOMENTS = (
    "as it sets out",
    "during its messages",
    "handing on",
    "when it has all",
    "when all have",
    "during its update",
)


# One on each side of the agreement that state has moved, and one at its edge.
DISTINCT = ("during its messages", "when it has all", "during its update")


def struck(prepared: Ready, moments: Sequence[str]) -> tuple[list[float], list[float], list[bool]]:
    """Lose a rank at one moment of a handover after the other; a newcomer takes its place.

    Returns:
        Losses without any incident, losses, and of each moment whether a step was then under new owners somewhere.
    """
    exe = compiled(prepared, clip=None)
    expected = train(exe, range(len(moments) + 2))
    exe.close()
    exe = compiled(prepared, clip=None)
    own, everybody = exe.rank, range(RANKS)
    losses, went_over = train(exe, [0]), []
    for number, moment in enumerate(moments, start=1):
        victim, home = number % RANKS, TWO[(MOMENTS.index(moment) + 1) % len(TWO)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hydragraph.engine.live_reshard.CHUNK", 4096)  # many messages
            if own == victim:
                strike_at(patch, exe, moment)
            try:
                exe.rehome(home)
                losses.append(exe.step(batch(len(losses))).loss)
                exe.step(batch(len(losses)))  # a rank that has finished cannot continue without the others
            except (hg.RankFailure, StruckError):
                pass
        exe.leave()
        if own == victim:
            exe = compiled(prepared, clip=None, joining=True)
        world = regroup(number, everybody)
        assert world is not None
        moved = exe.move(world, TWICE, [None if rank == victim else rank for rank in everybody])
        assert moved.restored is None, "nothing is lost"
        went_over.append(moved.step > number)
        exe.rehome(home)  # again, and at once left behind for what the next moment is to be struck at
        del losses[moved.step :]
        losses += [float("nan")] * (moved.step - len(losses))  # what this rank has not learned of a step that counts
        if moved.step == number:
            losses += train(exe, [number])
        exe.move(exe.world, TWICE, everybody)
    losses += train(exe, [len(losses)])
    exe.close()
    return expected, losses, went_over


def strike_at(patch: pytest.MonkeyPatch, exe: hg.Executable, moment: str) -> None:
    """Have this rank fail at a moment of its next handover."""
    end, every_to_all = LiveReshard.end, Groups.all_to_all
    first = iter([True])

    def sent(self: Groups, role: Channel, *given: Any) -> Any:
        if role is Channel.MOVE and not next(first, False):
            raise StruckError
        return every_to_all(self, role, *given)

    def handed_on(self: LiveReshard) -> None:
        end(self)
        raise StruckError

    def torn(self: Session, *_: object) -> None:
        self.log.updating()
        raise StruckError

    where: list[tuple[object, str, Callable[..., Any]]] = [
        (LiveReshard, "begin", lambda *_: stop()),
        (Groups, "all_to_all", sent),
        (LiveReshard, "end", lambda *_: stop()),
        (LiveReshard, "end", handed_on),
        (exe._transition, "take", stop),
        (Session, "update", torn),
    ]
    patch.setattr(*where[MOMENTS.index(moment)])


@pytest.mark.parametrize("moments", [DISTINCT, pytest.param(MOMENTS, marks=thorough)], ids=["three", "all"])
def test_a_rank_lost_at_any_moment_costs_the_step_under_way_and_no_bit_more(
    moments: Sequence[str], prepared: Ready
) -> None:
    found = hg.launch(struck, RANKS, prepared, moments, timeout=LIMIT)
    expected = found[0][0]
    assert len(expected) == len(moments) + 2
    for _, losses, _ in found:
        assert [a for a in losses if a == a] == [b for a, b in zip(losses, expected, strict=True) if a == a]
    assert all(any(losses[step] == loss for _, losses, _ in found) for step, loss in enumerate(expected))
    over = [moment in MOMENTS[4:] for moment in moments]
    assert [each[2] for each in found] == [over] * RANKS, "all go over, or none"

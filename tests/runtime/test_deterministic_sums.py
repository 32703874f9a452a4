"""Deterministic training: the same bits under any pipelines, ranks, homes and losses of ranks; what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.engine.compiled_model import of_least_cut
from hydragraph.ir.instruction import Op
from hydragraph.runtime import exchange
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.pending_work import Finish
from hydragraph.runtime.supported_optimizers import ELEMENTWISE
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from tests.models import llama, randomised, sequences
from tests.own_models import Small, small
from tests.ready import Ready
from tests.thorough import thorough

LIMIT = timedelta(seconds=120)
STEPS = 3
LAST = 5  # before this step all strikes have hit, and all ranks are back
CLUSTER = Cluster.homogeneous(4, device=Device(1e9, int(8e9), 1e10), within_node=Interconnect(2e9, 1e-6))
ONE = ["<[0]x1,[2]x1> + <[1]x2>", "4*<tp1,pp1>", "<[3]x2>", "<[1]x1r,[2]x1> + <[0]x2>"]
TWO = ["<[0,1]x2>", "<[2,0]x1,[1,3]x1>", "2*<tp2,pp1>"]
SPLIT = ["<[0,1]x2s>", "<[2,3]x1s,[1,0]x1sr>", "<[0,1]x2s> + <[3,2]x2s>"]


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def batch(step: int) -> list[Tensor]:
    return sequences([20, 7, 33, 1, 12, 5, 40, 11], seed=step)


@dataclass(frozen=True)
class Way:
    """One way to train the same."""

    strategies: Sequence[str]
    home: hg.Home | None = None


@dataclass(frozen=True)
class Seen:
    """All that is to be the same; weights on rank 0."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Seen)
        same = (self.losses, self.norms) == (other.losses, other.norms)
        return same and all(torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items())


def train(prepared: Ready, ways: Sequence[Way]) -> list[Seen]:
    return [train_one(prepared, way) for way in ways]


def train_one(prepared: Ready, way: Way) -> Seen:
    first = way.strategies[0]
    exe = prepared.executable(first, adamw, home=way.home, max_grad_norm=0.5, deterministic=True, check="off")
    reports = [exe.step(batch(i), way.strategies[i % len(way.strategies)]) for i in range(STEPS)]
    seen = Seen([r.loss for r in reports], [r.grad_norm for r in reports], exe.full_state_dict())
    exe.close()
    return seen


def test_pipelines_ranks_homes_and_copies_change_no_bit() -> None:
    model = randomised(small(layers=2))
    model.out.weight = model.tokens.weight
    prepared = Ready.of(model, ONE)
    ways = [Way(ONE[:1]), Way(ONE[1:], hg.Home([3, 1, 0, 2], copies=2))]
    first, other = hg.launch(train, 4, prepared, ways, timeout=LIMIT)[0]
    assert other == first
    alone = train(prepared, [Way(["<tp1,pp1>"])])[0]
    assert alone == first
    exe = prepared.executable("<tp1,pp1>", adamw, max_grad_norm=0.5, check="off")
    assert [exe.step(batch(i)).loss for i in range(STEPS)] == pytest.approx(first.losses, rel=1e-5)
    exe.close()


@thorough
@pytest.mark.parametrize("texts", [TWO, pytest.param(SPLIT, marks=thorough)], ids=["tp2", "sequence parallel"])
def test_stages_of_one_degree_change_no_bit(texts: list[str]) -> None:
    prepared = Ready.of(llama(layers=2), texts)
    ways = [Way(texts[:1]), Way(texts[1:], hg.Home([0, 2, 1, 1], copies=2))]
    first, *others = hg.launch(train, 4, prepared, ways, timeout=LIMIT)[0]
    assert all(other == first for other in others)


class Sideways(Small):
    """A layer whose output is column-major in memory, unless it is sent."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.turn = nn.Parameter(torch.randn(width, width) * 0.2)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return (self.turn @ super().forward(x, cu_seqlens).t()).t()


def test_where_stages_are_cut_changes_no_bit_of_states_that_lie_otherwise_in_memory() -> None:
    torch.manual_seed(0)
    model = small(layers=0)
    model.stack = nn.ModuleList([Sideways(32) for _ in range(2)])
    prepared = Ready.of(model, ["<[0]x2>", "<tp1,pp2>"])
    whole, cut = hg.launch(train, 2, prepared, [Way(["<[0]x2>"]), Way(["<tp1,pp2>"])], timeout=LIMIT)[0]
    assert whole == cut


# By member: the step in which it is killed, and the moment: at a push, or of the second message of sums to second
# owners when it is about to leave, under way, or here.
STRIKES = {2: (1, "push"), 1: (2, "sums"), 3: (3, "under way"), 0: (4, "here")}


def survive(prepared: Ready, struck: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Return this process's number and the losses that it has seen."""
    exe = prepared.executable(ONE[1], adamw, home=hg.Home(copies=2), deterministic=True, check="off")
    member = here()
    if struck and member is not None and member.number in struck:
        die_in_a_push(exe, *STRIKES[member.number])
    losses = {}
    while exe.steps < LAST + 1:
        try:
            while struck and exe.steps == LAST and exe.ranks < 4:
                exe.evaluate(batch(0))
                if (member := here()) is not None and exe.world.gather(member.called)[0]:
                    raise hg.Stopped(1000)
            report = exe.step(batch(exe.steps))
            losses[report.step] = report.loss
        except (hg.RankFailure, hg.Stopped) as failure:
            hg.survive(exe, failure)
    exe.close()
    return member.number if member is not None else -1, losses


def die_in_a_push(exe: hg.Executable, step: int, moment: str) -> None:
    handed = 0
    start = exchange.Transfer._handed

    def strike(now: str) -> None:
        if exe.steps == step and now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def handing(*arguments: Any) -> Finish:
        nonlocal handed
        handed += exe.steps == step
        if handed == 2:  # one has left
            strike("sums")
        finish = start(*arguments)
        if handed == 2:
            strike("under way")

        def result() -> Tensor:
            value = finish.result()
            strike("here")
            return value

        return replace(finish, result=result)

    exchange.Transfer._handed = handing  # pyrefly: ignore[bad-assignment, method-assign]
    exe._session.executor.before = lambda instruction: strike("push") if instruction.op is Op.PUSH else None


@pytest.fixture(scope="module")
def shared() -> Ready:
    return Ready.of(llama(layers=2), ONE)


@pytest.fixture(scope="module")
def smooth(shared: Ready) -> dict[int, float]:
    return hg.launch(survive, 4, shared, (), timeout=LIMIT)[0][1]


@thorough
@pytest.mark.parametrize(
    "members", [pytest.param((2, 1), marks=thorough), (3, 0)], ids=["push, sums", "under way, here"]
)
def test_ranks_that_are_killed_and_those_that_come_change_no_bit(
    members: tuple[int, ...], shared: Ready, smooth: dict[int, float]
) -> None:
    struck = hg.launch(survive, 4, shared, members, timeout=LIMIT, elastic=hg.Elastic())
    assert {number for number, _ in struck}.isdisjoint(members)
    assert len(struck) == 4
    for _, losses in struck:
        assert losses == {step: smooth[step] for step in losses}


def chosen_alike(prepared: Ready) -> tuple[Seen, list[str], tuple[tuple[int, bool], ...]]:
    """Let strategies be chosen; say which they were, and what others may be proposed by."""
    exe = prepared.executable(
        "auto",
        adamw,
        profile=Costs(datasheet(prepared.variants.program, CLUSTER), CLUSTER),
        lengths=[[len(s) for s in batch(i)] for i in range(STEPS)],
        policy=hg.Policy(workers=0),
        max_grad_norm=0.5,
        deterministic=True,
        check="off",
    )
    reports = [exe.step(batch(i)) for i in range(STEPS)]
    seen = Seen([r.loss for r in reports], [r.grad_norm for r in reports], exe.full_state_dict())
    assert isinstance(exe.profile, Costs)
    with pytest.raises(hg.Unsupported, match="degree 2, but others"):
        exe.check(hg.Strategy.parse("<tp2,pp1>", layers=2), 4)
    exe.close()
    return seen, [str(strategy) for strategy in exe.strategies], exe.profile.profile.cuts


@thorough
def test_strategies_that_are_chosen_have_one_degree_and_change_no_bit() -> None:
    prepared = Ready.of(llama(layers=2), ONE[2:3])
    assert {tp for tp, _ in datasheet(prepared.variants.program, CLUSTER).cuts} >= {1, 2}
    seen, strategies, cuts = hg.launch(chosen_alike, 4, prepared, timeout=LIMIT)[0]
    assert strategies
    assert cuts == ((1, False),)
    assert seen == hg.launch(train, 4, prepared, [Way(["<[3]x2>"])], timeout=LIMIT)[0][0]


def test_where_one_degree_does_not_fit_the_next_is_proposed() -> None:
    program = hg.capture(llama(layers=2), check="off")
    profile = datasheet(program, CLUSTER)
    asked = []

    def among(alike: Any) -> tuple[hg.Strategy, ...]:
        asked.append(alike.cuts)
        if alike.cuts[0][0] < 2:
            raise hg.Unsupported("it is too large", where="test", remedy="none")
        return (hg.Strategy.parse("<tp2,pp1>", layers=2),)

    assert of_least_cut(profile, among) == (hg.Strategy.parse("<tp2,pp1>", layers=2),)
    assert asked == [((1, False),), ((2, False),)]
    with pytest.raises(hg.Unsupported, match="too large"):
        of_least_cut(profile.of_cut(1, False), among)


def test_what_would_have_other_bits_is_refused() -> None:
    rules = Deterministic("a device")
    rules.check([hg.Strategy.parse("<tp2,pp1>", 2)])
    with pytest.raises(hg.Unsupported, match="degree 1, but others have tensor-parallel degree 2"):
        rules.check([hg.Strategy.parse("<tp2,pp1> + <tp1,pp1>", 2)])
    with pytest.raises(hg.Unsupported, match="with sequence parallelism, but others"):
        rules.check([hg.Strategy.parse("<[0,1]x2s>", 2)])
    with pytest.raises(hg.Unsupported, match="has sums in pieces"):
        rules.check([hg.Strategy.parse("<tp2,pp1>p", 2)])
    with pytest.raises(hg.Unsupported, match="ascending order"):
        Deterministic("a device").check([hg.Strategy.parse("<[1,0,2,3]x2>", 2)])
    with pytest.raises(hg.Unsupported, match="exact for at most 16384"):
        rules.check_count(20_000)
    with pytest.raises(hg.Unsupported, match="Inductor"):
        Deterministic.begin(torch.device("cpu"), "inductor")
    for fused in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        with pytest.raises(hg.Unsupported, match=rf"optimizer {fused.__name__}(?s:.*)hydragraph\.AdamW"):
            rules.check_optimizer(fused([nn.Parameter(torch.ones(3))], lr=0.1, fused=True))


@pytest.mark.parametrize("kind", [*ELEMENTWISE, hg.AdamW], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_optimizers_that_are_taken_round_alike_wherever_shards_end(kind: type[torch.optim.Optimizer]) -> None:
    size = 203  # vectors of 8 and of 16, and some elements more
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=draw)
    gradients = [torch.randn(size, generator=draw) * 10.0**-i for i in range(5)]

    def trained(bounds: Sequence[int]) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in start.tensor_split(bounds)]
        optimizer = kind(parts, lr=1e-2)  # pyrefly: ignore[missing-argument, unexpected-keyword]
        Deterministic("a device").check_optimizer(optimizer)
        for gradient in gradients:
            for part, piece in zip(parts, gradient.tensor_split(bounds), strict=True):
                part.grad = piece.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    whole = trained([])
    for bounds in ([1, 2, 5, 12], [7, 100, 101, 117], list(range(3, size, 11))):
        assert torch.equal(trained(bounds), whole)


def test_a_gradient_too_large_for_exact_sums_updates_nothing() -> None:
    prepared = Ready.of(small(), [])
    exe = prepared.executable("<tp1,pp1>", adamw, deterministic=True, check="off")
    weights = exe.full_state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydragraph.kernels.exact_sums.LARGEST", 1e-9)
        with pytest.raises(FloatingPointError, match="deterministic sums allow at most 1e-09"):
            exe.step(batch(0))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exe.full_state_dict().items())
    exe.step(batch(0))
    exe.close()

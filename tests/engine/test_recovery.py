"""Ranks are lost, leave and come, at any moment; the others continue in the same processes, with the same losses."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cluster.rendezvous.protocol import Generation
from hydragraph.cost.costs import Costs
from hydragraph.engine import recovery
from hydragraph.engine.candidate_strategies import Planning
from hydragraph.engine.recovery import costs_for, home_for, strategies_for
from hydragraph.engine.state_transfer import Moved
from hydragraph.engine.strategy_history import StrategyHistory
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.planner import plan as planning
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.runtime.executor import _Iteration
from tests.cost.priced import cluster, costs, mixed
from tests.models import captured, llama, sequences
from tests.own_models import small
from tests.ready import Ready
from tests.thorough import first, thorough

LIMIT = timedelta(seconds=120)
STEPS = 6
TEXT = "<tp1,pp2> + <tp1,pp1>"
STREAMED = "<[0]x1w,[1]x1> + <[2]x2w>"
TWICE = hg.Home(copies=2)


@pytest.fixture(scope="module")
def prepared() -> Ready:
    return Ready.of(small(2), [TEXT])


@dataclass(frozen=True)
class Told:
    """Observations of one rank."""

    pid: int
    losses: Mapping[int, float]
    survived: tuple[hg.Survived, ...]


@dataclass(frozen=True)
class Unborn:
    """Kills the processes of these seats that receive it."""

    seats: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unborn, (self.seats,)


def _unborn(seats: tuple[int, ...]) -> Unborn:
    if int(os.environ.get("RANK", "-1")) in seats:
        os.kill(os.getpid(), signal.SIGKILL)
    return Unborn(seats)


@dataclass(frozen=True)
class Plan:
    """What befalls members, by their numbers: after how many steps, and what.

    Attributes:
        killed: at a step's beginning.
        killed_at: during a step: the kind of the instruction.
        asked: to leave, at a step's beginning.
        killed_moving: at the beginning of their first move, or in its end.
        stopped: by SIGSTOP.
        hangs: before it has compiled anything.
        unborn: ends the processes of some seats before they meet the others.
        copies: how many owners everything has.
        wait_for: ranks that there must be before the last step.
        checkpoint: where each step is saved, and read from.
        text: the strategy of the first ranks.
        window: bytes in flight.
        pieces: where each step after the first is kept in pieces instead, and read from if they are newer.
    """

    killed: Mapping[int, int] = field(default_factory=dict)
    killed_at: Mapping[int, tuple[int, Op]] = field(default_factory=dict)
    asked: Mapping[int, int] = field(default_factory=dict)
    killed_moving: tuple[int, ...] = ()
    stopped: Mapping[int, int] = field(default_factory=dict)
    hangs: int | None = None
    unborn: Unborn | None = None
    copies: int = 2
    wait_for: int = 0
    checkpoint: Path | None = None
    pieces: Path | None = None
    text: str = TEXT
    window: int | None = None


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def batch(step: int) -> list[Tensor]:
    return sequences([20, 7, 33, 1, 12, 5], seed=step)


def train(prepared: Ready, plan: Plan) -> Told:
    member = here()
    while member is not None and member.number == plan.hangs:
        time.sleep(1)
    exe = prepared.executable(plan.text, adamw, home=hg.Home(copies=plan.copies), window=plan.window)
    pieces = None if plan.pieces is None else hg.Pieces(memory=False, disk=plan.pieces)
    restore: Any = plan.checkpoint if pieces is None else (pieces, plan.checkpoint)
    losses: dict[int, float] = {}
    survived: list[hg.Survived] = []
    while exe.steps < STEPS:
        try:
            befall(exe, plan)
            while exe.steps == STEPS - 1 and exe.ranks < plan.wait_for:
                exe.evaluate(batch(0)[-1:])
                time.sleep(0.1)  # for the newcomer to start
                if (member := here()) is not None and exe.world.gather(member.called)[0]:
                    raise hg.Stopped(1000)
            report = exe.step(batch(exe.steps))
            losses[report.step] = report.loss
            if pieces is not None and exe.steps > 1:
                exe.keep(pieces)
                pieces.wait()
            elif plan.checkpoint is not None:
                exe.save(plan.checkpoint)
        except (hg.RankFailure, hg.Stopped) as failure:
            survived.append(hg.survive(exe, failure, restore=restore))
    exe.close()
    return Told(os.getpid(), losses, tuple(survived))


def befall(exe: hg.Executable, plan: Plan) -> None:
    member = here()
    if member is None:
        return
    number, done = member.number, exe.steps
    if plan.killed.get(number) == done:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.stopped.get(number) == done:
        os.kill(os.getpid(), signal.SIGSTOP)
    if plan.asked.get(number) == done and not member.leaving:
        os.kill(os.getpid(), signal.SIGTERM)
    if number in plan.killed_at and plan.killed_at[number][0] == done:
        strike(exe, plan.killed_at[number][1], lambda: os.kill(os.getpid(), signal.SIGKILL))
    if number in plan.killed_moving:
        exe.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyrefly: ignore[bad-assignment, method-assign]


def strike(exe: hg.Executable, wanted: Op, act: Callable[[], None]) -> None:
    def hook(instruction: Instruction) -> None:
        if instruction.op is wanted:
            act()

    exe._session.executor.before = hook


@pytest.fixture(scope="module")
def smooth(prepared: Ready) -> Mapping[int, float]:
    return hg.launch(train, 3, prepared, Plan(), timeout=LIMIT)[0].losses


def run(prepared: Ready, plan: Plan, elastic: hg.Elastic) -> list[Told]:
    return hg.launch(train, 3, prepared, plan, timeout=LIMIT, elastic=elastic)


def same(told: list[Told], smooth: Mapping[int, float]) -> None:
    merged = {step: loss for each in told for step, loss in each.losses.items()}
    assert merged.keys() == smooth.keys()
    for step, loss in merged.items():
        assert loss == pytest.approx(smooth[step], rel=1e-5)


ALONE = hg.Elastic(rejoin=False)


def test_a_killed_rank_is_gone_and_the_others_go_on_in_their_processes(
    prepared: Ready, smooth: Mapping[int, float]
) -> None:
    told = run(prepared, Plan(killed_at={1: (2, Op.BACKWARD)}), ALONE)
    assert len(told) == 2
    same(told, smooth)
    for each in told:
        (survived,) = each.survived
        assert (survived.lost, survived.left, survived.joined, survived.restored) == ((1,), (), (), None)
        assert "SIGKILL" in survived.why or "ended" in survived.why
        assert each.pid in {peer.pid for peer in survived.peers}


def test_another_rank_is_killed_while_the_rest_recovers_and_processes_come_in_their_places(
    prepared: Ready, smooth: Mapping[int, float], tmp_path: Path
) -> None:
    plan = Plan(killed={1: 2}, killed_moving=(2,), wait_for=2, checkpoint=tmp_path / "saved")
    told = run(prepared, plan, hg.Elastic())
    same(told, smooth)
    assert len(told) >= 2


def test_a_rank_that_is_asked_to_leave_hands_over_what_only_it_has(
    prepared: Ready, smooth: Mapping[int, float]
) -> None:
    told = run(prepared, Plan(asked={2: 3}, copies=1), ALONE)
    assert len(told) == 2
    same(told, smooth)
    assert all(each.survived[-1].left == (2,) and each.survived[-1].restored is None for each in told)


def test_a_newcomer_that_hangs_before_it_is_ready_is_given_up_and_another_joins(
    prepared: Ready, smooth: Mapping[int, float]
) -> None:
    told = run(prepared, Plan(killed={1: 2}, hangs=3, wait_for=3), hg.Elastic(progress_s=1.0))
    assert len(told) == 3
    same(told, smooth)
    assert max(peer.member for each in told for survived in each.survived for peer in survived.peers) == 4


@thorough
@pytest.mark.parametrize("op", list(Op))
def test_killed_at_every_kind_of_instruction(prepared: Ready, smooth: Mapping[int, float], op: Op) -> None:
    same(run(prepared, Plan(killed_at={0: (2, op)}), ALONE), smooth)


@thorough
@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH])
def test_killed_while_stages_stream_one_block_at_a_time(prepared: Ready, smooth: Mapping[int, float], op: Op) -> None:
    same(run(prepared, Plan(killed_at={0: (2, op)}, text=STREAMED, window=0), ALONE), smooth)


@thorough
def test_stopped(prepared: Ready, smooth: Mapping[int, float]) -> None:
    told = run(prepared, Plan(stopped={1: 2}), ALONE)
    assert len(told) == 2
    same(told, smooth)


@thorough
def test_from_disk(prepared: Ready, smooth: Mapping[int, float], tmp_path: Path) -> None:
    told = run(prepared, Plan(killed={1: 3}, copies=1, checkpoint=tmp_path / "saved"), ALONE)
    same(told, smooth)
    assert all(each.survived[0].restored in (2, 3) for each in told)


def test_from_pieces_that_are_newer_than_the_checkpoint(
    prepared: Ready, smooth: Mapping[int, float], tmp_path: Path
) -> None:
    plan = Plan(killed={1: 3}, copies=1, checkpoint=tmp_path / "saved", pieces=tmp_path / "pieces")
    told = run(prepared, plan, ALONE)
    same(told, smooth)
    assert all(each.survived[0].restored in (2, 3) for each in told)
    assert all(each.survived[0].read["disk"] > 0 for each in told)


@thorough
def test_a_spare_steps_in(prepared: Ready, smooth: Mapping[int, float]) -> None:
    told = run(prepared, Plan(killed={1: 4}, wait_for=3), hg.Elastic(spares=1, rejoin=False))
    assert len(told) == 3
    same(told, smooth)


@pytest.mark.parametrize("unborn", first([[0, 2]], [[0, 2], [1]]), ids=str)
def test_ranks_that_are_lost_before_any_state_exists_are_not_needed(
    prepared: Ready, smooth: Mapping[int, float], unborn: list[int]
) -> None:
    told = run(prepared, Plan(unborn=Unborn(tuple(unborn))), ALONE)
    assert len(told) == 3 - len(unborn)
    same(told, smooth)


@thorough
def test_too_few_ranks_end_with_a_sentence(prepared: Ready) -> None:
    with pytest.raises(hg.TooFewRanks, match=r"2 ranks are left, fewer than min_ranks \(3\)"):
        run(prepared, Plan(killed={1: 2}), hg.Elastic(min_ranks=3, rejoin=False))


def test_without_elastic_the_failure_is_raised() -> None:
    with pytest.raises(hg.RankFailure, match="rank 1 failed"):
        hg.survive(None, hg.RankFailure(1, "step", "it was killed"))  # pyrefly: ignore[bad-argument-type]


def test_a_second_executable_is_refused_once_another_has_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "here", lambda: SimpleNamespace(holds=2))
    second: Any = SimpleNamespace(joined=1)
    with pytest.raises(ValueError, match="survive: the ranks have already recovered with another executable"):
        hg.survive(second, hg.RankFailure(2, "step", "it is lost"))


def test_the_result_says_whether_this_rank_finished_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = iter([True, False])  # the second one follows a rank that hands over its state and ends
    generations = iter([Generation(2, (0, 1), leaving=(1,)), Generation(3, (0,))])
    member = SimpleNamespace(holds=1, number=0, generation=Generation(1, (0, 1)), peers=())
    member.meet = lambda failure: next(generations)
    exe: Any = SimpleNamespace(
        joined=1, past=StrategyHistory(), recent=(), strategies=(), progress_s=1.0, leave=lambda: None
    )
    monkeypatch.setattr(recovery, "here", lambda: member)
    monkeypatch.setattr(recovery, "_move", lambda *_: Moved(3, next(moves), None, {}, 0, 0.0))
    survived = hg.survive(exe, hg.RankFailure(1, "step", "it is lost"))
    assert (survived.step, survived.finished, exe.joined) == (3, True, 3)


def test_a_failed_step_is_freed_before_the_ranks_meet(prepared: Ready) -> None:
    exe = hg.compile(prepared.model, "<tp1,pp1>", adamw, device="cpu", program=prepared.variants.program)
    running: list[weakref.ref[Any]] = []
    freed: list[bool] = []

    def fail(instruction: Instruction) -> None:
        if instruction.op is Op.BACKWARD:
            raise hg.RankFailure(0, "", "an error")

    def iteration(*arguments: Any) -> object:
        made = _Iteration(*arguments)
        running.append(weakref.ref(made))
        return made

    def meet(failure: BaseException) -> None:
        freed.append(running[0]() is None)
        raise TimeoutError

    exe._session.executor.before = fail
    before = exe._session.executor._buffers
    member = SimpleNamespace(generation=SimpleNamespace(members=[0]), holds=0, meet=meet)
    try:
        with mock.patch("hydragraph.runtime.executor._Iteration", iteration):
            exe.step(batch(0))
    except hg.RankFailure as error:
        with mock.patch("hydragraph.engine.recovery.here", return_value=member), pytest.raises(TimeoutError):
            hg.survive(exe, error)
    assert freed == [True]
    assert exe._session.executor._buffers is not before


def test_devices_of_other_types_stay_what_they_are_where_ranks_are_fewer() -> None:
    whole = costs(2, mixed())
    some = costs_for(whole, [2, 1], TWICE)
    assert isinstance(some, Costs)
    assert ([some.cluster.type_of(rank) for rank in range(2)], some.home) == (["slow", "fast"], TWICE)
    assert costs_for(whole, [0, 4], TWICE) is whole.profile
    later = costs_for(whole, [5, 3], TWICE, priced=[0, 3, 5, 6])  # measured again once other seats were taken
    assert isinstance(later, Costs)
    assert [later.cluster.type_of(rank) for rank in range(2)] == ["slow", "fast"]
    assert costs_for(None, [0], TWICE) is None


def test_where_nothing_given_fits_devices_that_differ_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four devices are left, one of them slow: layers split evenly would all wait for that one."""
    program, _ = captured("llama")
    hurried = partial(planning.plan, deadline_s=0.0)
    monkeypatch.setattr(planning, "plan", hurried)
    left = costs(2, cluster(3), hg.Health({2: 4.0}))
    lengths = [[24] * 8]
    exe: Any = SimpleNamespace(
        given="4*<tp1,pp1>",
        program=program,
        planning=Planning(lengths=lengths),
        may_stream=True,
        check=lambda strategy, ranks: check_strategy(program, strategy, ranks),
    )
    world: Any = SimpleNamespace(ranks=3, rank=0, gather=lambda value: [value])
    best = hurried(left, hg.Workload(lengths=lengths)).strategies
    assert strategies_for(exe, world, hg.Home(), left) == best
    exe.given = "auto"
    assert strategies_for(exe, world, hg.Home(), left) == best
    exe.given = ["4*<tp1,pp1>", "3*<tp1,pp1>"]
    assert strategies_for(exe, world, hg.Home(), left) == (hg.Strategy.parse("3*<tp1,pp1>", 2),)
    exe.given = "4*<tp1,pp1>"
    assert strategies_for(exe, world, hg.Home(), None) == (hg.Strategy.parse("3*<tp1,pp1>", 2),)


@thorough
def test_a_run_that_looks_for_the_best_later_goes_on_with_a_good_plan_at_once() -> None:
    program = hg.capture(llama(layers=4), check="off")
    left = costs(4, mixed()).of_ranks([0, 2, 3], hg.Home())
    lengths = [[24] * 12, [200, 12]]
    exe: Any = SimpleNamespace(given="auto", program=program, planning=Planning(lengths=lengths))
    ran = hg.Strategy.parse("<[0]x1,[1]x3> + <[2]x2,[3]x2>", 4)
    # The leader is a newcomer without history: another rank tells it what ran in seats 0 to 3.
    periods = StrategyHistory().ended([ran], 4).periods
    world: Any = SimpleNamespace(ranks=3, rank=0, gather=lambda value: [value, periods] if value == () else [value])
    (found,) = strategies_for(exe, world, hg.Home(), left, StrategyHistory(), [0, 2, 3])
    check_strategy(program, found, 3)
    workload = hg.Workload(lengths=lengths)
    costs_then = left.changed(home=hg.Home())
    best = hg.plan(costs_then, workload)
    assigned = static_or_dynamic(
        tuple(costs_then.pipelines(s) for s in (found, best.strategy)),
        tuple(costs_then.fixed(s) for s in (found, best.strategy)),
        lengths,
        Policy(),
    )
    assert assigned.seconds[0] <= 1.3 * assigned.seconds[1]
    nothing = costs(4, mixed()).of_ranks([0], hg.Home())
    alone: Any = SimpleNamespace(ranks=1, rank=0, gather=lambda value: [value])
    assert strategies_for(exe, alone, hg.Home(), nothing, StrategyHistory(), [0]) == (
        hg.Strategy.parse("<tp1,pp1>", 4),
    )


def test_homes_of_other_ranks() -> None:
    assert home_for(hg.Home(copies=2), [0, 2, 3]) == hg.Home(copies=2)
    assert home_for(hg.Home(copies=2), [3]) == hg.Home()
    assert home_for(hg.Home(shares=[3, 3, 1, 0]), [0, 2, 3]).shares == (3.0, 1.0, 0.0)
    assert home_for(hg.Home(shares=[3, 1]), [0, 5]).shares == (3.0, 2.0)
    domains = hg.Home(copies=2, nodes=[0, 0, 1, 1])
    assert home_for(domains, [0, 2, 3]) == hg.Home(copies=2, nodes=[0, 1, 1])
    assert home_for(domains, [2, 3]) == home_for(domains, [0, 2, 4]) == hg.Home(copies=2)
    assert home_for(domains, [0, 1, 2], leaving=[2]).nodes is None
    assert home_for(hg.Home(), [0, 1, 2], leaving=[1]).shares == (1.0, 0.0, 1.0)
    assert home_for(hg.Home(shares=[0, 1]), [0, 1], leaving=[1]).shares == (1.0, 0.0)

"""Decisions of the controller, with a planner and ranks that tests drive; and real ranks that switch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.corrections import Corrections
from hydragraph.cost.costs import Costs
from hydragraph.planner.policy import Policy
from hydragraph.runtime.instruction_trace import ExposedSeconds, RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers import controller as controller_module
from hydragraph.train.stragglers.background_replanning import Replanned, ReplanQuestion
from hydragraph.train.stragglers.controller import Controller, Replanning
from hydragraph.train.stragglers.rate_estimator import Change
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough
from tests.train.stragglers.test_background_replanning import CLUSTER, LAYERS, RUNNING, profile, request

OTHER = hg.Strategy.parse("<[0]x1,[2]x3> + <[3]x4>", layers=LAYERS)
STEPS = 100
ASSIGNED = Assignment((((0,),), ()), (100,))


@dataclass(frozen=True)
class Step:
    """As the controller reads it."""

    step: int
    seconds: float
    chosen: Strategy = RUNNING
    planning_s: float = 0.0
    preparing_s: float = 0.0
    assignment: Assignment = ASSIGNED
    ranks: tuple[RankTimes, ...] = tuple(RankTimes(1.0, ExposedSeconds(), (1.0,)) for _ in range(4))


class Given:
    """A monitor that says what the test says."""

    def __init__(self) -> None:
        self.health = Health()
        self.changes: tuple[Change, ...] = ()
        self.corrections = Corrections()

    def observe(self, *_: object) -> tuple[Change, ...]:
        changes, self.changes = self.changes, ()
        return changes

    def baseline(self, *_: object) -> None:
        raise AssertionError("nobody has probed")

    def becomes(self, rank: int, rate: float) -> None:
        self.changes = (Change(rank, self.health.rate(rank), rate),)
        self.health = Health({rank: rate})


def answering(before_s: float, after_s: float, refused: str = "", to: Strategy = OTHER) -> Replanned:
    return Replanned((RUNNING, to), request(RUNNING, to), 1, before_s, after_s, 0.5, refused)


class Answering:
    """A planner that answers one step later; a long search finds the quick search's plan, unless `better` is given."""

    def __init__(
        self, before_s: float = 4.0, after_s: float = 2.0, refused: str = "", better: Replanned | None = None
    ) -> None:
        self.rehearsed: list[ReplanQuestion] = []
        self.asked: list[ReplanQuestion] = []
        self._waiting = 0
        self._at_once = answering(before_s, after_s, refused)
        self._better = better or answering(after_s, after_s, refused)

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    def ask(self, question: ReplanQuestion) -> None:
        self.asked.append(question)
        self._waiting = 2

    def answer(self) -> Replanned | None:
        self._waiting -= 1
        at_once = self.asked[-1].at_once or self.asked[-1].running == (RUNNING,)
        return None if self._waiting else self._at_once if at_once else self._better

    def start(self) -> None:
        pass

    def forget(self) -> None:
        self.rehearsed.append(self.asked.pop())
        self._waiting = 0

    def close(self) -> None:
        pass


def controlled(
    planner: Any,
    switched: list[Replanned] | None,
    hurried: bool = False,
    planned_for: Health | None = None,
) -> tuple[Controller, Given]:
    monitor: Any = Given()
    given = Replanning(
        ReplanQuestion(
            Costs(profile(), CLUSTER), ((50, 50), (60,)), (RUNNING,), (RUNNING,), request(RUNNING), Policy()
        ),
        planner,
        None if switched is None else switched.append,
        STEPS,
        hurried=hurried,
        planned_for=planned_for or Health(),
    )
    return Controller(monitor, given), monitor


def run(controller: Controller, monitor: Given, slow_at: dict[int, float], steps: int) -> list[Any]:
    events: list[Any] = []
    for step in range(1, steps + 1):
        if step in slow_at:
            monitor.becomes(1, slow_at[step])
        report: Any = Step(step, 8.0 if monitor.health.rates else 3.0)
        events += controller.stepped(report)
    return events


def test_a_straggler_leads_to_a_switch_with_its_reason() -> None:
    planner = Answering()
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    events = run(controller, monitor, {10: 2.57}, 16)
    assert [event.event for event in events] == ["straggler", "switch", "replan"]
    assert [(each.costs.health, each.at_once) for each in planner.asked] == [
        (Health({1: 2.57}), True),
        (Health({1: 2.57}), False),
    ]
    assert len(switched) == 1
    decision = events[1]
    assert decision.done
    assert decision.ranks == (1,)
    assert decision.after_s == pytest.approx(decision.before_s / 2), "steps as measured, by the ratio that plans say"
    assert str(OTHER) in decision.why
    assert "no state moves" in decision.why


def test_steps_that_take_other_times_than_expected_lead_to_the_best_plan_by_measured_seconds() -> None:
    planner = Answering(4.0, 2.0)
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    run(controller, monitor, {}, 5)
    assert not planner.asked
    monitor.corrections = Corrections(
        ("", "", "", ""), {(TimeKind.FORWARD, 0): (2.0,) * 8, (TimeKind.BACKWARD, 0): (2.0,) * 8}
    )
    assert controller.correct()
    events = run(controller, monitor, {}, 6)
    assert [(each.costs.health, each.at_once, each.costs.corrections) for each in planner.asked] == [
        (Health(), False, monitor.corrections)
    ]
    assert [event.event for event in events] == ["switch"]
    assert not Controller(monitor).correct(), "ranks are only watched"  # pyrefly: ignore[bad-argument-type]


def test_of_a_static_choice_only_the_strategy_in_use_counts_as_running() -> None:
    planner: Any = Answering()
    both = request(OTHER, RUNNING)
    strategies = (OTHER, RUNNING)
    question = ReplanQuestion(Costs(profile(), CLUSTER), ((50,),), strategies, strategies, both, Policy())
    given = Replanning(question, planner, None, STEPS, static=1)
    monitor: Any = Given()
    run(Controller(monitor, given), monitor, {10: 2.57}, 10)
    (asked,) = planner.asked
    assert (asked.running, asked.request, asked.first) == ((RUNNING,), both.only(1), (OTHER, RUNNING))


def test_a_dry_run_decides_and_does_nothing() -> None:
    planner = Answering()
    controller, monitor = controlled(planner, None)
    events = run(controller, monitor, {10: 2.57}, 14)
    assert [(event.event, event.done) for event in events] == [("straggler", True), ("switch", False)]
    assert events[1].why.startswith("dry run")
    assert [each.at_once for each in planner.asked] == [False], "without hurry, it searches for the best plan"


def test_who_plans_rehearses_while_all_are_well() -> None:
    planner = Answering()
    controller, monitor = controlled(planner, [])
    assert not run(controller, monitor, {}, 5)
    assert [(each.costs.health, each.at_once) for each in planner.rehearsed] == [(Health(), True)]
    assert not planner.asked


def test_what_was_found_at_once_after_a_loss_is_looked_at_with_more_care_while_all_are_well() -> None:
    planner = Answering(4.0, 3.0)
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched, hurried=True)
    events = run(controller, monitor, {}, 8)
    assert [event.event for event in events] == ["switch"]
    assert [(each.costs.health, each.at_once) for each in planner.asked] == [(Health(), False)], "once is enough"
    assert planner.asked[0].lengths[:2] == ((50, 50), (60,)), "a sample stands in for mini-batches not yet seen"
    assert len(switched) == 1


def test_a_rank_that_was_slow_before_a_loss_is_no_news_after_it() -> None:
    planner = Answering()
    controller, monitor = controlled(planner, [], hurried=True, planned_for=Health({1: 2.57}))
    monitor.health = Health({1: 2.57})
    run(controller, monitor, {}, 8)
    assert [(each.costs.health, each.at_once) for each in planner.asked] == [(Health({1: 2.57}), False)]


def test_a_better_plan_that_is_found_later_is_taken_too_and_not_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "COOLDOWN", 20)
    third = hg.Strategy.parse("<[0]x4> + <[2]x4>", layers=LAYERS)
    planner = Answering(better=answering(2.0, 1.5, to=third))
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    events = run(controller, monitor, {10: 2.57}, 16)
    assert [event.event for event in events] == ["straggler", "switch", "switch"]
    assert planner.asked[1].running == (OTHER,), "it is asked what is better than what runs by then"
    assert [each.strategies[1] for each in switched] == [OTHER, third]
    assert events[2].step - events[1].step == 3, "it waits for a step that no switch holds up"
    assert events[2].before_s == 8.0


def test_rates_that_change_again_come_before_a_better_plan_for_the_old_ones() -> None:
    planner = Answering(4.0, 3.9)
    controller, monitor = controlled(planner, [])
    run(controller, monitor, {10: 2.57, 11: 5.42}, 13)
    assert [(each.costs.health, each.at_once) for each in planner.asked] == [
        (Health({1: 2.57}), True),
        (Health({1: 5.42}), True),
    ]


def test_a_plan_for_a_rank_that_has_recovered_meanwhile_is_not_taken() -> None:
    planner = Answering()
    planner._better = answering(4.0, 4.0, to=RUNNING)
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    events = run(controller, monitor, {10: 2.57}, 11)
    monitor.becomes(1, 1.0)
    report: Any = Step(12, 3.0)
    events += controller.stepped(report)
    assert [event.event for event in events] == ["straggler", "recovered"]
    assert not switched
    assert [each.costs.health for each in planner.asked] == [Health({1: 2.57}), Health()]


@pytest.mark.parametrize(
    ("planner", "why"),
    [
        (Answering(4.0, 3.9), "less"),  # too little
        (Answering(4.0, 2.0, "no strategy fits the remaining ranks"), "no strategy fits"),
    ],
)
def test_what_does_not_pay_is_told_and_not_done(planner: Answering, why: str) -> None:
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    events = run(controller, monitor, {10: 2.57}, 14)
    assert [(event.event, event.done) for event in events] == [("straggler", True), ("replan", False)]
    assert why in events[1].why
    assert events[1].why.startswith("no switch")
    assert not switched


def test_a_plan_that_is_found_again_is_told_without_seconds() -> None:
    planner = Answering(better=answering(4.0, 4.0, to=RUNNING))
    planner._at_once = answering(4.0, 4.0, to=RUNNING)
    controller, monitor = controlled(planner, [])
    event = run(controller, monitor, {10: 2.57}, 14)[1]
    assert (event.event, event.done) == ("replan", False)
    assert "it is still the fastest; planned in" in event.why


def test_a_switch_that_pays_back_too_late_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "COST_S", 1000.0)
    switched: list[Replanned] = []
    controller, monitor = controlled(Answering(), switched)
    run(controller, monitor, {10: 2.57}, 14)
    assert not switched


def test_after_a_switch_nothing_is_asked_for_a_while_and_then_a_repaired_device_comes_back() -> None:
    planner = Answering()
    switched: list[Replanned] = []
    controller, monitor = controlled(planner, switched)
    events = run(controller, monitor, {10: 2.57, 14: 1.0}, 30)
    told = [event for event in events if event.event != "replan"]
    assert [event.event for event in told] == ["straggler", "switch", "recovered", "switch"]
    assert [each.costs.health for each in planner.asked if each.at_once] == [Health({1: 2.57}), Health()]
    assert told[3].step - told[1].step >= 6
    assert all(each.running == (OTHER,) for each in planner.asked[1:])
    assert all(each.first == (RUNNING,) for each in planner.asked)


# Real ranks.


def ready() -> Ready:
    return Ready.of(llama(layers=LAYERS), [str(RUNNING), str(OTHER)])


def both(prepared: Ready) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    return trained(prepared, None), trained(prepared, 2)


def trained(prepared: Ready, switch_at: int | None) -> list[tuple[float, str]]:
    exe = prepared.executable(
        RUNNING,
        lambda named: torch.optim.SGD(named, lr=1e-2),
        check="off",
        profile=profile(),
        policy=Policy(workers=0),
    )
    seen = []
    for step in range(4):
        if step == switch_at and exe.rank == 0:
            exe.choose_from([OTHER], request(OTHER))
        report = exe.step(sequences([60, 33, 20, 41, 17], seed=step))
        assert len(report.ranks) == 4
        seen.append((report.loss, report.strategy))
    exe.close()
    return seen


@thorough  # tests/engine/test_background_compile.py switches ranks in every run
def test_all_ranks_switch_at_once_and_losses_stay_the_same() -> None:
    as_ever, switching = zip(*hg.launch(both, 4, prepare=ready), strict=True)
    assert all(each == switching[0] for each in switching)
    assert [name for _, name in switching[0][:2]] == [str(RUNNING)] * 2
    assert [name for _, name in switching[0][2:]] == [str(OTHER)] * 2
    for (one, _), (other, _) in zip(as_ever[0], switching[0], strict=True):
        assert other == pytest.approx(one, rel=1e-5)

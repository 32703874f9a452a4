"""Straggler controller, which decides on one rank when to plan again and switch plans.

    a rate changes     -> request a quick plan from another process, while training continues
    steps take longer or shorter than expected (`expected_seconds`)
                       -> correct the costs by measured block times, and request the best plan
    a plan arrives     -> if the gain until the run's end exceeds the cost, prepare the new strategies during
                          training, then switch all ranks
                       -> after a quick plan, also request the best plan

A new plan's expected step time is multiplied by the running plan's ratio of measured to expected time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from hydragraph.engine.step_report import StepReport
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers.background_replanning import Replanned, Replanner, ReplanQuestion
from hydragraph.train.stragglers.lateness import Lateness
from hydragraph.train.stragglers.monitor import Monitor
from hydragraph.train.stragglers.rate_estimator import NEEDED, Change
from hydragraph.train.stragglers.reshard_policy import ReshardPolicy
from hydragraph.train.stragglers.run_events import RunEvent
from hydragraph.train.stragglers.straggler_state import LearnedSlowdown, SlowRank

LAST = 8
# Minimum fraction of step time that a switch must save
GAIN = 0.05
# Minimum steps between switches, unless a rank is lost
COOLDOWN = 6
# Assumed seconds of a switch until one is measured
COST_S = 2.0


@dataclass(frozen=True)
class Replanning:
    """Inputs of replanning.

    Attributes:
        question: first question, with costs of healthy ranks, and lengths to plan for until mini-batches have run.
        switch: changes the strategies on all ranks; None for a dry run.
        refused: returns why the ranks did not switch, or "".
        hurried: whether the initial strategies come from a quick plan.
    """

    question: ReplanQuestion
    planner: Replanner
    switch: Callable[[Replanned], None] | None
    steps: int
    changing: Callable[[], bool] = lambda: False
    refused: Callable[[], str] = lambda: ""
    hurried: bool = False
    static: int | None = None
    planned_for: Health = field(default_factory=Health)
    late: Lateness = field(default_factory=Lateness)


@dataclass(frozen=True)
class _Coming:
    event: RunEvent
    health: Health
    strategies: tuple[Strategy, ...]
    request: PlanRequest


class Controller:
    """Controller that decides after each step whether to plan again, switch plans, or move state.

    Args:
        monitor: measures ranks' speed; needed by `replanning`.
        replanning: if None, strategies never change.
        following: if None, state never moves.
    """

    def __init__(
        self, monitor: Monitor | None, replanning: Replanning | None = None, following: ReshardPolicy | None = None
    ) -> None:
        self.following = following
        self.monitor = monitor
        self._replanning = replanning
        self._first = True
        self._planned_for = Health()
        self._asked_for = Health()
        self._asked_at = 0
        # Whether the last question was for a quick plan
        self._at_once = False
        # Whether costs have changed since the last question
        self._corrected = False
        self._switched_at: int | None = None
        # The switch that is being prepared or made
        self._coming: _Coming | None = None
        self._lengths: deque[tuple[int, ...]] = deque(maxlen=LAST)
        self._seconds: deque[float] = deque(maxlen=NEEDED)
        self._rehearsing = replanning is not None
        if replanning is not None:
            self._question = question = replanning.question
            if (only := replanning.static) is not None:
                running = (question.running[only],)
                self._question = replace(question, running=running, request=question.request.only(only))
            self._cost_s = COST_S
            self._lengths.extend(question.lengths)
            self._at_once = replanning.hurried
            self._planned_for = self._asked_for = replanning.planned_for
            self._lateness = replanning.late
            replanning.planner.start()

    def stepped(self, report: StepReport) -> tuple[RunEvent, ...]:
        events: list[RunEvent] = []
        if self.monitor is not None:
            # First speed measurements: the reference for later ones.
            if self._first and all(times.probe > 0 for times in report.ranks):
                self.monitor.baseline(report.ranks)
            changes = self.monitor.observe(report.chosen, report.assignment, report.ranks)
            events += [_event_of(change, report.step) for change in changes]
        self._first = False
        if self._replanning is not None:
            events += self._replan(self._replanning, report)
        if self.following is not None:
            events += self._follow(self.following, report)
        return tuple(events)

    @property
    def health(self) -> Health:
        """Measured slowdowns, increased for ranks that delay others."""
        return self._measured if self._replanning is None else self._lateness.planned(self._measured)

    @property
    def _measured(self) -> Health:
        return Health() if self.monitor is None else self.monitor.health

    @property
    def slow(self) -> Mapping[int, SlowRank]:
        """Slow ranks, with learned rates if they delayed others."""
        learned: Mapping[int, LearnedSlowdown] = {} if self._replanning is None else self._lateness.learned
        measured: Mapping[int, SlowRank] = {} if self.monitor is None else self.monitor.slow
        ranks = sorted({*measured, *learned})
        return {rank: replace(measured.get(rank, SlowRank()), learned=learned.get(rank)) for rank in ranks}

    def correct(self) -> bool:
        """Correct costs by measured block times and request a plan; return False if the run never replans."""
        if self._replanning is None or self.monitor is None:
            return False
        costs = self._question.costs.changed(corrections=self.monitor.corrections)
        self._question = replace(self._question, costs=costs)
        self._corrected = True
        return True

    def _follow(self, following: ReshardPolicy, report: StepReport) -> tuple[RunEvent, ...]:
        running: tuple[Strategy, ...] = (report.chosen,)
        if self._replanning is not None:
            running += self._question.running
        if self._coming is not None:
            running += self._coming.strategies
        tokens = max(map(sum, (report.assignment.lengths, *self._lengths)))
        return following.stepped(report.step, self.health, report.seconds, tuple(dict.fromkeys(running)), tokens)

    def late_among(self, numbers: Mapping[int, int], switched: bool) -> Lateness:
        return Lateness(switched) if self._replanning is None else self._lateness.among(numbers, switched)

    def released(self) -> Replanner | None:
        if self._replanning is None:
            return None
        self._replanning.planner.forget()
        return self._replanning.planner

    def close(self) -> None:
        if self._replanning is not None:
            self._replanning.planner.close()

    def _replan(self, given: Replanning, report: StepReport) -> list[RunEvent]:
        self._lengths.append(tuple(n for n in report.assignment.lengths if n))
        # While a switch is prepared, no plan is requested or compared.
        if self._coming is not None:
            return [] if given.changing() else [self._switched(given, self._coming, report)]
        took = report.seconds - report.preparing_s
        self._seconds.append(took)
        self._lateness.stepped(report.chosen, report.assignment, report.ranks, self._measured, took)
        if self._rehearsing and not given.planner.busy:
            self._rehearse(given)
        events = []
        # Decide only once a step time is measured.
        answer = given.planner.answer() if given.planner.busy and self._seconds else None
        # If other ranks are slow by now, `_ask` requests a new plan.
        if answer is not None and {*self._asked_for} == {*self.health}:
            event = self._decided(given, answer, report.step)
            if self._coming is not None:
                # Reported when all ranks have switched
                return []
            events += [event] if event.event == "switch" or not self._at_once else []
        self._ask(report.step)
        return events

    def _switched(self, given: Replanning, coming: _Coming, report: StepReport) -> RunEvent:
        self._coming = None
        event = replace(coming.event, step=report.step)
        if reason := given.refused():
            event = replace(event, event="replan", why=f"no switch: {reason}", done=False)
        else:
            self._question = replace(self._question, running=coming.strategies, request=coming.request)
            self._planned_for = coming.health
            self._switched_at = report.step
            self._cost_s = report.preparing_s
            self._seconds.clear()
            self._lateness.switched()
            ready = f"prepared during {report.step - coming.event.step - 1} steps"
            event = replace(event, seconds=report.preparing_s, why=f"{event.why}; {ready}")
        self._ask(report.step)
        return event

    def _rehearse(self, given: Replanning) -> None:
        """Request a plan that is not used, so that the planning process loads its modules early."""
        self._rehearsing = False
        self._put(given.planner, Health(), at_once=True)
        given.planner.forget()

    def _ask(self, step: int) -> None:
        replanning = self._replanning
        assert replanning is not None, "a controller without replanning never requests plans"
        health = self.health
        if replanning.planner.busy:
            return
        # New rates: request a quick plan, then the best one. Corrected costs: the best one.
        if health != self._asked_for and self._may_switch(step, health):
            # A dry run requests the best plan at once
            self._at_once = replanning.switch is not None
        elif health == self._asked_for and (self._at_once or self._corrected):
            self._at_once = self._corrected = False
        else:
            return
        self._asked_for = health
        self._asked_at = step
        self._put(replanning.planner, health, self._at_once)

    def _may_switch(self, step: int, health: Health) -> bool:
        # The running plan uses a lost rank.
        if health.lost and health.lost != self._planned_for.lost:
            return True
        return self._switched_at is None or step - self._switched_at >= COOLDOWN

    def _put(self, planner: Replanner, health: Health, at_once: bool) -> None:
        home = None if self.following is None else self.following.target
        costs = self._question.costs.changed(health=health, home=home)
        planner.ask(replace(self._question, costs=costs, lengths=tuple(self._lengths), at_once=at_once))

    def _decided(self, given: Replanning, answer: Replanned, step: int) -> RunEvent:
        rates = {rank: self._asked_for.rate(rank) for rank in {*self._asked_for, *self._planned_for}}
        ranks = tuple(sorted(rates))
        refused = partial(RunEvent, step, "replan", ranks, answer.took_s, rates=rates, done=False)
        if answer.refused:
            return refused(f"no switch: {answer.refused}")
        # Scale both plans' expected times so that the running plan's equals its measured time.
        now_s = median(self._seconds)
        after_s = now_s * answer.after_s / answer.before_s
        left = given.steps - step
        saved = 1 - after_s / now_s
        gained = f"saves {left * (now_s - after_s):.3g} s in the remaining {left} steps"
        cost = f"preparation takes about {self._cost_s:.2g} s, and no state moves"
        terms = f"steps of {now_s:.3g} s would take {after_s:.3g} s ({saved:.0%} less), which {gained}; {cost}"
        planned = f"planned in {answer.took_s:.2g} s during {step - self._asked_at} steps"
        pays = left * (now_s - after_s) > self._cost_s
        what = _text(answer.chosen)
        running = _text(self._question.running)
        if saved < GAIN or not pays:
            other = f"with {what}, {terms}" if what != running else "it is still the fastest"
            why = f"no switch from {running}: {other}; {planned}"
            return refused(why, before_s=now_s, after_s=after_s)
        why = f"to {what}: {terms}; {planned}{self._waited_for()}"
        event = RunEvent(step, "switch", ranks, self._cost_s, why, rates, now_s, after_s)
        if given.switch is None:
            return replace(event, why=f"dry run, not done: {why}", done=False)
        try:
            given.switch(answer)
        except ValueError as error:
            return refused(f"no switch: {error}", before_s=now_s, after_s=after_s)
        assert answer.request is not None, "an answer with strategies has a request"
        request = answer.request if answer.static is None else answer.request.only(answer.static)
        self._coming = _Coming(event, self._asked_for, answer.chosen, request)
        return event

    def _waited_for(self) -> str:
        measured = self._measured
        late = {rank: rate for rank, rate in self._asked_for.rates.items() if rate > measured.rate(rank) > 1}
        return "".join(
            f"; other ranks waited for rank {rank}, so plans assume that it takes {x:.3g} times as long as its peers"
            for rank, x in late.items()
        )


def _text(strategies: Sequence[Strategy]) -> str:
    return " or ".join(map(str, strategies))


def _event_of(change: Change, step: int) -> RunEvent:
    who = f"rank {change.rank}"
    if change.recovered:
        why = f"{who} is as fast as its peers again (before, it took {change.before:.3g} times as long)"
        return RunEvent(step, "recovered", (change.rank,), 0.0, why, {change.rank: 1.0})
    since = "" if change.before == 1 else f" (before: {change.before:.3g})"
    why = f"{who} takes {change.rate:.3g} times as long as its peers{since}"
    return RunEvent(step, "straggler", (change.rank,), 0.0, why, {change.rank: change.rate})

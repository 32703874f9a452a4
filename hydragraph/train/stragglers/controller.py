"""The controller: what a run does about ranks that are slow; on one rank, between steps.

    a rate changes -> ask for a good plan at once, in a process of its own -> training goes on
    an answer is there -> switch, if what it gains until the run ends is more than what switching costs: what the new
                          strategies need is made beside training, then all ranks go by them
                       -> ask for the best plan, which takes longer, and decide again

A change of strategy alone moves no state: it costs what preparing its first step takes. A gain that is small, or a
switch just after another, is left alone: rates are noisy, and each switch prepares anew.

What plans say of seconds is corrected by what steps take: if a plan promises 3 s instead of 4 s, and steps take 5 s
now, then 5 s x 3 / 4 = 3.75 s are expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from hydragraph.cost.costs import Costs
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import PlanRequest
from hydragraph.runtime.instruction_trace import RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers.background_replanning import Question, Replanned
from hydragraph.train.stragglers.lateness import Lateness
from hydragraph.train.stragglers.monitor import Monitor
from hydragraph.train.stragglers.rate_estimator import NEEDED, Change
from hydragraph.train.stragglers.reshard_policy import Following
from hydragraph.train.stragglers.run_events import Event
from hydragraph.train.stragglers.straggler_state import Slow

LAST = 8  # mini-batches that a plan is made for


class Stepped(Protocol):
    """What a step reports, as far as it matters here (`executable.StepReport`)."""

    step: int
    seconds: float
    planning_s: float
    preparing_s: float
    assignment: Assignment
    chosen: Strategy
    ranks: tuple[RankTimes, ...]


class Asked(Protocol):
    """Who plans (`replanning.Replanner`)."""

    @property
    def busy(self) -> bool:
        """Whether a question is under way, or its answer has not been taken."""

    def ask(self, question: Question) -> None:
        """Begin to answer a question."""

    def answer(self) -> Replanned | None:
        """Take the answer; None: it is not there yet."""

    def start(self) -> None:
        """Get ready."""

    def forget(self) -> None:
        """Answer no more what was asked, which was about other ranks."""

    def close(self) -> None:
        """End."""


Switch = Callable[[Replanned], None]


@dataclass(frozen=True)
class Thrift:
    """When a switch is worth it.

    Attributes:
        gain: the part of a step's time that must be saved.
        cooldown: steps after a switch before the next one, unless a rank is lost.
        cost_s: what a switch is taken to cost before one was seen.
    """

    gain: float = 0.05
    cooldown: int = 6
    cost_s: float = 2.0


@dataclass(frozen=True)
class Replanning:
    """What planning again needs.

    Attributes:
        costs: of the model on healthy ranks, with the home that the run has.
        strategies, request: what the run chooses from, and by what, at first.
        policy: how mini-batches are planned.
        planner: who plans.
        switch: lets all ranks choose from other strategies, as soon as they are ready; None: a dry run.
        steps: of the whole run.
        thrift: when a switch is worth it.
        changing: whether ranks are not ready yet for what they are to switch to.
        refused: why they do not switch after all; "" where they have.
        sample: lengths of mini-batches, by which to plan before enough were seen.
        hurried: whether what the run chooses from at first was found at once, so that the best is to be looked for.
        planned_for: the rates of ranks that this was planned for.
        late: what slow ranks cost beyond their rates, as far as is known.
    """

    costs: Costs
    strategies: tuple[Strategy, ...]
    request: PlanRequest
    policy: Policy
    planner: Asked
    switch: Switch | None
    steps: int
    thrift: Thrift = Thrift()
    changing: Callable[[], bool] = lambda: False
    refused: Callable[[], str] = lambda: ""
    sample: tuple[tuple[int, ...], ...] = ()
    hurried: bool = False
    planned_for: Health = field(default_factory=Health)
    late: Lateness = field(default_factory=Lateness)


@dataclass(frozen=True)
class _Coming:
    """A switch that was decided.

    Attributes:
        event: that says so.
        health: that it was planned for.
        strategies, request: what the run will choose from, and by what.
    """

    event: Event
    health: Health
    strategies: tuple[Strategy, ...]
    request: PlanRequest


class Controller:
    """Decides after every step.

    Args:
        monitor: knows how fast ranks are.
        replanning: what planning again needs; None: ranks are watched only.
        following: decides where state lives; None: it stays.
    """

    def __init__(
        self, monitor: Monitor, replanning: Replanning | None = None, following: Following | None = None
    ) -> None:
        self.following = following
        self.monitor = monitor
        self._replanning = replanning
        self._first = True
        self._planned_for = Health()
        self._asked_for = Health()
        self._asked_at = 0
        self._at_once = False  # the last answer that was asked for is to come at once, so a better one may follow
        self._switched_at: int | None = None
        self._coming: _Coming | None = None  # what ranks get ready for, or have switched to with the step under way
        self._lengths: deque[tuple[int, ...]] = deque(maxlen=LAST)
        self._seconds: deque[float] = deque(maxlen=NEEDED)
        self._rehearsing = replanning is not None
        if replanning is not None:
            self._strategies = replanning.strategies
            self._cost_s = replanning.thrift.cost_s
            self._lengths.extend(replanning.sample)
            self._at_once = replanning.hurried
            self._planned_for = self._asked_for = replanning.planned_for
            self._lateness = replanning.late
            replanning.planner.start()

    def stepped(self, report: Stepped) -> tuple[Event, ...]:
        """Take in a step; return what happened."""
        if self._first and all(times.probe > 0 for times in report.ranks):
            self.monitor.baseline(report.ranks)
        self._first = False
        changes = self.monitor.observe(report.chosen, report.assignment, report.ranks)
        events = [_event_of(change, report.step) for change in changes]
        if self._replanning is not None:
            events += self._replan(self._replanning, report)
        if self.following is not None:
            events += self._follow(self.following, report)
        return tuple(events)

    @property
    def health(self) -> Health:
        """The rates that decisions go by: those of the monitor, and more for ranks that others wait for."""
        known = self.monitor.health
        return known if self._replanning is None else self._lateness.planned(known)

    @property
    def slow(self) -> Mapping[int, Slow]:
        """What is known of slow ranks, and what was learned of those that others waited for."""
        learned = {} if self._replanning is None else self._lateness.learned
        known = self.monitor.slow
        return {
            rank: replace(known.get(rank, Slow()), learned=learned.get(rank)) for rank in sorted({*known, *learned})
        }

    def _follow(self, following: Following, report: Stepped) -> tuple[Event, ...]:
        """Decide where state lives, by what may run and by the largest mini-batch of the last ones."""
        running: tuple[Strategy, ...] = (report.chosen,)
        if self._replanning is not None:
            running += self._replanning.strategies
        if self._coming is not None:
            running += self._coming.strategies
        tokens = max(map(sum, (report.assignment.lengths, *self._lengths)))
        return following.stepped(report.step, self.health, report.seconds, tuple(dict.fromkeys(running)), tokens)

    def late_among(self, numbers: Mapping[int, int], switched: bool) -> Lateness:
        """Return what is known of slow ranks that stay, see `Lateness.among`."""
        return Lateness(switched) if self._replanning is None else self._lateness.among(numbers, switched)

    def released(self) -> Asked | None:
        """Return who plans, ready for the controller of other ranks; None: nobody does."""
        if self._replanning is None:
            return None
        self._replanning.planner.forget()
        return self._replanning.planner

    def close(self) -> None:
        """End who plans."""
        if self._replanning is not None:
            self._replanning.planner.close()

    def _replan(self, given: Replanning, report: Stepped) -> list[Event]:
        self._lengths.append(tuple(n for n in report.assignment.lengths if n))
        if self._coming is not None:
            return [] if given.changing() else [self._switched(given, self._coming, report)]
        took = report.seconds - report.preparing_s
        self._seconds.append(took)
        self._lateness.stepped(report.chosen, report.assignment, report.ranks, self.monitor.health, took)
        if self._rehearsing and not given.planner.busy:
            self._rehearse(given)
        events = []
        # Just after a switch nobody knows what steps take now: an answer waits for one of them.
        answer = given.planner.answer() if given.planner.busy and self._seconds else None
        if answer is not None:
            event = self._decided(given, answer, report.step)
            if self._coming is not None:
                return []  # told when all ranks have switched
            # What gains too little at once is told when all was looked at.
            events += [event] if event.event == "switch" or not self._at_once else []
        self._ask(report.step)
        return events

    def _switched(self, given: Replanning, coming: _Coming, report: Stepped) -> Event:
        """Take down that ranks have switched with the step that has ended, or that they do not; tell it."""
        self._coming = None
        event = replace(coming.event, step=report.step)
        if reason := given.refused():
            event = replace(event, event="replan", why=f"stays: {reason}", done=False)
        else:
            self._replanning = replace(given, strategies=coming.strategies, request=coming.request)
            self._planned_for = coming.health
            self._switched_at = report.step
            self._cost_s = report.preparing_s
            self._seconds.clear()
            self._lateness.switched()
            ready = f"ready beside {report.step - coming.event.step - 1} steps"
            event = replace(event, seconds=report.preparing_s, why=f"{event.why}; {ready}")
        self._ask(report.step)
        return event

    def _rehearse(self, given: Replanning) -> None:
        """Let who plans load what planning needs, and find out what depends on no rate, before anybody is slow."""
        self._rehearsing = False
        given.planner.ask(self._question(given, Health(), at_once=True))
        given.planner.forget()

    def _ask(self, step: int) -> None:
        """Ask for another plan, if rates have changed, or if the last one was found in a hurry."""
        given = self._replanning
        assert given is not None, "asked of those that plan"
        health = self.health
        if given.planner.busy:
            return
        if health != self._asked_for and self._may_switch(given, step, health):
            self._at_once = given.switch is not None  # a dry run waits for the best
        elif health == self._asked_for and self._at_once:
            self._at_once = False
        else:
            return
        self._asked_for = health
        self._asked_at = step
        given.planner.ask(self._question(given, health, self._at_once))

    def _may_switch(self, given: Replanning, step: int, health: Health) -> bool:
        """Say whether it is worth asking: not just after a switch, unless a rank that is used is lost."""
        if health.lost and health.lost != self._planned_for.lost:
            return True
        return self._switched_at is None or step - self._switched_at >= given.thrift.cooldown

    def _question(self, given: Replanning, health: Health, at_once: bool) -> Question:
        return Question(
            given.costs.profile,
            given.costs.cluster,
            given.costs.home if self.following is None else self.following.target,
            health,
            tuple(self._lengths),
            given.strategies,
            self._strategies,
            given.request,
            given.policy,
            at_once=at_once,
        )

    def _decided(self, given: Replanning, answer: Replanned, step: int) -> Event:
        """Switch if that pays; return the decision, with its reason."""
        rates = {rank: self._asked_for.rate(rank) for rank in {*self._asked_for, *self._planned_for}}
        ranks = tuple(sorted(rates))
        if answer.refused:
            return Event(step, "replan", ranks, answer.took_s, f"stays: {answer.refused}", rates, done=False)
        now_s = median(self._seconds)
        after_s = now_s * answer.after_s / answer.before_s
        left = given.steps - step
        saved = 1 - after_s / now_s
        gained = f"saves {left * (now_s - after_s):.3g} s in the {left} steps that are left"
        cost = f"preparing takes about {self._cost_s:.2g} s and no state moves"
        terms = f"steps of {now_s:.3g} s would take {after_s:.3g} s ({saved:.0%} less), which {gained}; {cost}"
        planned = f"planned in {answer.took_s:.2g} s beside {step - self._asked_at} steps"
        pays = left * (now_s - after_s) > self._cost_s
        what = _names(answer)
        if saved < given.thrift.gain or not pays:
            why = f"stays {_running(given)}: with {what} {terms}; {planned}"
            return Event(step, "replan", ranks, answer.took_s, why, rates, now_s, after_s, done=False)
        why = f"to {what}: {terms}; {planned}{self._waited_for()}"
        if given.switch is None:
            return Event(step, "switch", ranks, self._cost_s, f"dry run, not done: {why}", rates, now_s, after_s, False)
        try:
            given.switch(answer)
        except ValueError as error:
            return Event(step, "replan", ranks, answer.took_s, f"stays: {error}", rates, now_s, after_s, done=False)
        assert answer.request is not None, "an answer that is not refused has a request"
        request = answer.request if answer.static is None else answer.request.only(answer.static)
        strategies = answer.strategies if answer.static is None else (answer.strategies[answer.static],)
        event = Event(step, "switch", ranks, self._cost_s, why, rates, now_s, after_s)
        self._coming = _Coming(event, self._asked_for, strategies, request)
        return event

    def _waited_for(self) -> str:
        """Say which ranks are planned as slower than they compute, since others waited for them."""
        known = self.monitor.health
        late = {rank: rate for rank, rate in self._asked_for.rates.items() if rate > known.rate(rank) > 1}
        return "".join(
            f"; others waited for rank {rank}: it is planned as {x:.3g} times as slow" for rank, x in late.items()
        )


def _names(answer: Replanned) -> str:
    chosen = answer.strategies if answer.static is None else (answer.strategies[answer.static],)
    return " or ".join(map(str, chosen))


def _running(given: Replanning) -> str:
    return " or ".join(map(str, given.strategies))


def _event_of(change: Change, step: int) -> Event:
    who = f"rank {change.rank}"
    if change.recovered:
        why = f"{who} is as fast as its peers again (it took {change.before:.3g} times as long)"
        return Event(step, "recovered", (change.rank,), 0.0, why, {change.rank: 1.0})
    since = "" if change.before == 1 else f" (before: {change.before:.3g})"
    why = f"{who} takes {change.rate:.3g} times as long as its peers{since}"
    return Event(step, "straggler", (change.rank,), 0.0, why, {change.rank: change.rate})

"""From many proposals to the few that are looked at exactly: what is cheap to know decides what is worth more.

its pipelines' recurrence   every proposal              no iteration ends sooner
with traffic (`exchange`)   while that is below the best that is known
memory and owners           those that may still be the best, and what is chosen among
a simulation                the best, and whatever is estimated to end before it
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.cost.costs import Costs
from hydragraph.planner.metis.staging import Staged
from hydragraph.planner.uneven.exchange import iteration_s
from hydragraph.planner.uneven.settle import (
    Candidate,
    Settled,
    Shortage,
    settle,
    share_out,
    simulated,
    strategies_of,
)
from hydragraph.planner.uneven.shares import home_of
from hydragraph.planner.uneven.simple import Simple
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy

# Ranks up to which three plans are simulated, and up to which two are.
FEW = 16
MANY = 64
# What is estimated to save less than this part is not simulated: estimates are seldom nearer than that.
SAVES = 0.003
# Plans that are settled at most, where one is chosen among near-equal ones.
SETTLED = 6
# A simulation takes about so many times as long as the estimate of it.
SIMULATION = 40


@dataclass(frozen=True)
class Proposal:
    """A strategy that might be the best.

    Attributes:
        strategy, assignment: what would run.
        last_s: when its last pipeline ends, beside pull, push and update: nothing ends sooner.
        expected_s: seconds of an iteration, roughly.
        origin: which way of searching it came from.
        across: the same with its pipelines placed otherwise, if that is possible.
    """

    strategy: Strategy
    assignment: Assignment
    last_s: float
    expected_s: float
    origin: str
    across: Strategy | None = None


@dataclass(frozen=True)
class Finalists:
    """What is known at the end.

    Attributes:
        settled: strategies that fit, with their memory and owners.
        passed: proposals that were left before that: they were expected to take longer.
        short: strategies that do not fit.
    """

    settled: tuple[Settled, ...]
    passed: tuple[Proposal, ...]
    short: tuple[Shortage, ...]


def proposals(
    costs: Costs,
    lengths: Sequence[int],
    candidates: Sequence[Candidate],
    stages: Sequence[Staged],
    simple: Sequence[Simple],
) -> list[Proposal]:
    """Return strategies on ranks with sequences shared out, the most promising first; of equal ones the first."""
    found: dict[Strategy, Proposal] = {}
    for candidate in sorted(candidates, key=lambda each: each.seconds):
        strategy, *others = strategies_of(candidate)
        if strategy not in found:
            assignment, last = share_out(costs, strategy, lengths, candidate.together)
            across = others[0] if others else None
            expected = last + candidate.exposed_s()
            found[strategy] = Proposal(strategy, assignment, last, expected, candidate.origin, across)
    for each in simple:
        if each.strategy not in found:
            assignment, last = share_out(costs, each.strategy, lengths, each.together)
            found[each.strategy] = Proposal(each.strategy, assignment, last, last, "simple")
    for one in stages:
        if one.seconds is not None and one.strategy not in found:
            last = one.seconds - costs.fixed(one.strategy)
            found[one.strategy] = Proposal(one.strategy, one.assignment, last, one.seconds, "search")
    return sorted(found.values(), key=lambda each: each.expected_s)


def finalists(
    costs: Costs,
    found: Sequence[Proposal],
    near: float,
    until: float | None,
    known: dict[Strategy, Settled | Shortage] | None = None,
) -> Finalists:
    """Look at the most promising proposals exactly.

    Args:
        found: see `proposals`.
        near: what is within this part of the best is settled, too.
        until: after this time (of `time.monotonic`) nothing more is looked at than one plan that fits.
        known: strategies that were looked at before; those that are looked at here are added.
    """
    known = {} if known is None else known
    began = time.monotonic()
    estimates = _estimated(costs, found, near, until)
    each_s = (time.monotonic() - began) / max(1, len(estimates))
    # Without an estimate they are looked at only while nothing fits.
    others = [each for each in found if each.strategy not in {one.strategy for one in estimates}]
    passed: list[Proposal] = []
    settled: list[Settled] = []
    short: list[Shortage] = []
    for proposal in [*sorted(estimates, key=lambda each: each.expected_s), *others]:
        best = min((one.seconds for one in settled), default=math.inf)
        worth = proposal not in others and proposal.expected_s < best * (1 + (near or -SAVES))
        enough = len(settled) >= (SETTLED if near else _simulations(costs))
        if settled and (_late(until, 0.0) or not worth or enough):
            passed.append(proposal)
            continue
        able = len(settled) < _simulations(costs) and not _late(until, SIMULATION * each_s)
        one = known.get(proposal.strategy)
        if one is None:
            one = settle(costs, proposal.strategy, proposal.assignment, proposal.origin, proposal.expected_s)
        if isinstance(one, Settled) and able and not one.simulated:
            one = simulated(costs, one)
        known[proposal.strategy] = one
        if isinstance(one, Shortage):
            short.append(one)
        else:
            settled.append(one)
    passed.sort(key=lambda each: each.expected_s)
    return Finalists(tuple(settled), tuple(passed), tuple(short))


def _estimated(costs: Costs, found: Sequence[Proposal], near: float, until: float | None) -> list[Proposal]:
    """Return proposals with their traffic, but for those that end later than the best without it."""
    best = math.inf
    estimates: list[Proposal] = []
    for proposal in found:
        if estimates and (_late(until, 0.0) or proposal.last_s >= best * (1 + near)):
            continue
        for strategy in (proposal.strategy, proposal.across):
            if strategy is None:
                continue
            seconds = proposal.expected_s
            if not strategy.shares:
                # Owners as they would be with memory for all: what they really can hold is looked at later.
                home = home_of(costs, strategy, [1.0] * costs.ranks, costs.home) or costs.home
                seconds = iteration_s(costs.changed(home=home), strategy, proposal.assignment)
            estimates.append(replace(proposal, strategy=strategy, expected_s=seconds))
            best = min(best, seconds)
    return estimates


def _late(until: float | None, needed_s: float) -> bool:
    """Return whether something that takes so long would end after a time."""
    return until is not None and time.monotonic() + needed_s > until


def _simulations(costs: Costs) -> int:
    """Return how many plans are simulated: fewer where that takes longer."""
    return 3 if costs.ranks <= FEW else 2 if costs.ranks <= MANY else 1

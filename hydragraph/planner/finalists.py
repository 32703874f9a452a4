"""From many proposals to the few that are looked at exactly: what is cheap to know decides what is worth more.

its pipelines' recurrence   every proposal              no iteration ends sooner,
what cards must carry       every proposal              nor before this
with traffic (`exchange`)   while that is below the best that is known
with fewer pipelines        the best of these, while less traffic saves more than the pipelines did
with its own micro-batches  those that may then be best, each in its turn: cut for each pipeline, as a run cuts them
memory and owners           those that may still be the best, and what is chosen among
a simulation                the best, and whatever is estimated to end before it

Every pipeline pulls all weights, so one behind a slow link may cost more than it computes: the search, which knows
links only roughly, cannot tell. A pipeline that gets no micro-batch costs only.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import compress, count

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.generators.metis_stages import Staged
from hydragraph.planner.generators.symmetric import Simple
from hydragraph.planner.micro_batch_sizes import cut, promised
from hydragraph.planner.price_candidate import (
    Candidate,
    Settled,
    Shortage,
    form_of,
    owners,
    owners_by_block,
    settle,
    share_out,
    simulated,
    strategies_of,
)
from hydragraph.planner.state_shares import home_of, homes_of
from hydragraph.planner.traffic_bound import Cards
from hydragraph.planner.traffic_estimate import Iterations, iteration_s
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

# Ranks up to which three plans are simulated, and up to which two are.
FEW = 16
MANY = 64
# What is estimated to save less than this part is not simulated: estimates are seldom nearer than that.
SAVES = 0.003
# Plans that are settled at most, where one is chosen among near-equal ones.
SETTLED = 6
# Of the best by estimate, how many are tried with fewer pipelines.
LEANER = 3
# Of the best by estimate, how many are given the micro-batches that a run would give them.
CUT = 4
# What they then take is seldom less than this part of what was promised.
PROMISED = 0.97
# Whether others can do the work of pipelines in time is estimated to about this part.
ROUGHLY = 0.95
# Where pull and push make an iteration so many times as long, equal owners are tried, too.
WAITING = 1.05
# A simulation takes about so many times as long as the estimate of it.
SIMULATION = 40

# Bytes of state that change their owner when ranks own it like this.
Moved = Callable[[Home], int]
# The same with the seconds of a simulation.
Exactly = Callable[[Settled], Settled]


@dataclass(frozen=True)
class Proposal:
    """A strategy that might be the best.

    Attributes:
        strategy, assignment: what would run.
        last_s: when its last pipeline ends, beside pull, push and update.
        expected_s: seconds of an iteration, roughly.
        origin: which way of searching it came from.
        across: the same with its pipelines placed otherwise, if that is possible.
        least_s: what no iteration of it is below, by its pipelines and by what cards carry.
    """

    strategy: Strategy
    assignment: Assignment
    last_s: float
    expected_s: float
    origin: str
    across: Strategy | None = None
    least_s: float = 0.0


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
            # Where stages are shared, the seconds are those of a simulation, and only owners can make them fewer.
            shares = one.strategy.shares
            last = one.seconds if shares else costs.pipelines_end(one.strategy, one.assignment)
            found[one.strategy] = Proposal(one.strategy, one.assignment, last, one.seconds, "search")
    every: dict[Strategy, Proposal] = {}
    cards = Cards(costs)
    carried = (_carried(cards, _busy(each)) for each in found.values())
    for proposal in sorted(carried, key=lambda each: each.expected_s):
        every.setdefault(proposal.strategy, proposal)
    return list(every.values())


def _carried(cards: Cards, proposal: Proposal) -> Proposal:
    """Return it as expected to end when cards have carried all, at least."""
    strategies = [each for each in (proposal.strategy, proposal.across) if each is not None and not each.shares]
    least = min(map(cards.least_s, strategies), default=0.0)
    return replace(proposal, expected_s=max(proposal.expected_s, least), least_s=max(proposal.last_s, least))


def _busy(proposal: Proposal) -> Proposal:
    """Return it without the pipelines that run no micro-batch."""
    assignment = proposal.assignment
    runs = [bool(count) for count in assignment.counts]
    if all(runs):
        return proposal
    strategies = (proposal.strategy, proposal.across)
    strategy, across = (None if each is None else _some(each, runs) for each in strategies)
    assert strategy is not None, "some pipeline runs micro-batches"
    given = tuple(compress(assignment.micro_batches, runs))
    return replace(proposal, strategy=strategy, assignment=Assignment(given, assignment.lengths), across=across)


def _some(strategy: Strategy, kept: Sequence[bool]) -> Strategy:
    return Strategy(tuple(compress(strategy.pipelines, kept)), strategy.schedule)


def finalists(
    costs: Costs,
    found: Sequence[Proposal],
    near: float,
    until: float | None,
    known: dict[tuple[Strategy, Assignment], Settled | Shortage] | None = None,
    moved: Moved | None = None,
    exactly: Exactly | None = None,
) -> Finalists:
    """Look at the most promising proposals exactly.

    Args:
        found: see `proposals`.
        near: what is within this part of the best is settled, too.
        until: after this time (of `time.monotonic`) nothing more is looked at than one plan that fits.
        known: what was looked at before; what is looked at here is added.
        moved: bytes that change their owner for a home; of proposals within `near` of each other, those are looked at
            first that move fewest. None: those first that end first.
        exactly: simulates; default: with these costs.
    """
    known = {} if known is None else known
    exactly = exactly or partial(simulated, costs)
    began = time.monotonic()
    clock = _Clock(costs)
    estimates = _estimated(costs, clock, found, near, until)
    each_s = (time.monotonic() - began) / max(1, len(estimates))
    # Without an estimate they are looked at only while nothing fits.
    estimated = {one.strategy for one in estimates}
    others = [each for each in found if each.strategy not in estimated]
    queue = _Queue(costs, clock, estimates, others, until, near, moved)
    settled: dict[Strategy, Settled] = {}
    short: list[Shortage] = []
    while True:
        best = min((one.seconds for one in settled.values()), default=math.inf)
        enough = len(settled) >= (SETTLED if near else _simulations(costs))
        if settled and (_late(until, 0.0) or enough):
            break
        proposal = queue.next(best * (1 + (near or -SAVES)))
        if proposal is None:
            break
        if proposal.strategy in settled:
            continue  # with better micro-batches
        able = len(settled) < _simulations(costs) and not _late(until, SIMULATION * each_s)
        asked = (proposal.strategy, proposal.assignment)
        one = known.get(asked)
        if one is None:
            one = settle(costs, *asked, proposal.origin, proposal.expected_s)
            if isinstance(one, Settled) and proposal.expected_s > WAITING * proposal.last_s:
                one = _owned(costs, one)
        if isinstance(one, Settled) and able and not one.simulated:
            one = exactly(one)
        known[asked] = one
        if isinstance(one, Shortage):
            short.append(one)
        else:
            settled[proposal.strategy] = one
    passed = [each for each in queue.left() if each.strategy not in settled]
    return Finalists(tuple(settled.values()), tuple(passed), tuple(short))


class _Queue:
    """Proposals, the most promising first, each with micro-batches as a run cuts them where it then ends sooner.

    Traffic hides behind the first and the last micro-batch of a pipeline, so larger ones also hide more of it. How long
    they may be takes a while to find out: they are cut when it is their turn, by what may be promised (`promised`).

    Args:
        estimates: with their traffic.
        others: those that come last.
    """

    def __init__(
        self,
        costs: Costs,
        clock: _Clock,
        estimates: Sequence[Proposal],
        others: Sequence[Proposal],
        until: float | None,
        near: float,
        moved: Moved | None,
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._until = until
        self._near = near
        self._moved = moved
        self._cut = 0
        self._cut_s = 0.0  # that one took at most
        self._numbers = count()
        # Seconds, in which order of equal ones, and whether it is still to be cut.
        self._heap: list[tuple[float, int, bool, Proposal]] = []
        for each in estimates:
            self._add(each.expected_s, each)
        for each in estimates:
            if not each.strategy.shares and not _late(until, 0.0):
                best = promised(costs, each.strategy, each.assignment.lengths)
                self._add(PROMISED * clock.seconds(each.strategy, best), each, uncut=True)
        self._others = deque(others)

    def _add(self, seconds: float, proposal: Proposal, uncut: bool = False) -> None:
        heappush(self._heap, (seconds, next(self._numbers), uncut, proposal))

    def next(self, limit: float) -> Proposal | None:
        """Return the next one, if it may take fewer seconds than so many; others only without a limit."""
        while self._heap and self._heap[0][0] < limit:
            uncut, each = self._pop(limit)
            if not uncut:
                return each
            # What is cut is settled next, which takes about as long.
            if self._cut < CUT and not _late(self._until, 2 * self._cut_s):
                self._cut += 1
                began = time.monotonic()
                self._try(each)
                self._cut_s = max(self._cut_s, time.monotonic() - began)
        return self._others.popleft() if self._others and math.isinf(limit) else None

    def _pop(self, limit: float) -> tuple[bool, Proposal]:
        """Take the most promising one out; or, of those about as promising, the one that moves fewest bytes."""
        if self._moved is None:
            return heappop(self._heap)[2:]
        limit = min(limit, self._heap[0][0] * (1 + self._near))
        equal = [entry for entry in self._heap if entry[0] < limit] or self._heap[:1]
        homes = [self._clock.home(each.strategy) for *_, each in equal]
        _, entry = min(zip(map(self._moved, homes), equal, strict=True), key=lambda two: (two[0], *two[1][:2]))
        self._heap.remove(entry)
        heapify(self._heap)
        return entry[2:]

    def _try(self, each: Proposal) -> None:
        """Add it as it is cut, if that ends sooner."""
        try:
            assignment, last = cut(self._costs, each.strategy, each.assignment.lengths)
        except Unsupported:  # a sequence is too long for equal owners, which a plan need not have
            return
        seconds = self._clock.seconds(each.strategy, assignment)
        if seconds < each.expected_s:
            self._add(seconds, _busy(replace(each, assignment=assignment, last_s=last, expected_s=seconds)))

    def left(self) -> list[Proposal]:
        """Return those that were never looked at, the most promising first."""
        found = [each for _, _, uncut, each in self._heap if not uncut]
        return sorted([*found, *self._others], key=lambda each: each.expected_s)


def _owned(costs: Costs, one: Settled) -> Settled:
    """Return it with the owners with which it ends soonest: as they are, equal ones, or such as suit each block."""
    one = _equally_owned(costs, one)
    found = None if one.strategy.shares else owners_by_block(costs, one.strategy, one.assignments[0])
    if found is None or found[0] == one.home:
        return one
    home, memory = found
    (assignment,) = one.assignments
    seconds = [iteration_s(costs.changed(home=each), one.strategy, assignment) for each in (one.home, home)]
    return replace(one, home=home, memory=memory) if seconds[1] < seconds[0] * (1 - SAVES) else one


def _equally_owned(costs: Costs, one: Settled) -> Settled:
    """Return it with equal owners, of the ranks that train, where memory suffices for them and it then ends sooner.

    Owners of unlike parts hold pieces of others' shards, which travel; what a rank owns of its own shard does not.
    """
    devices = set(one.strategy.devices)
    shares = tuple(int(rank in devices) for rank in range(costs.ranks))
    equal = replace(one.home, shares=None if all(shares) else shares)
    if one.strategy.shares or one.home.copies > 1 or equal == one.home:
        return one
    (assignment,) = one.assignments
    seconds = [iteration_s(costs.changed(home=home), one.strategy, assignment) for home in (one.home, equal)]
    if seconds[1] >= seconds[0] * (1 - SAVES):
        return one
    found = owners(costs, one.strategy, assignment, equal)
    return one if isinstance(found, Shortage) else replace(one, home=equal, memory=found[1])


def _estimated(
    costs: Costs, clock: _Clock, found: Sequence[Proposal], near: float, until: float | None
) -> list[Proposal]:
    """Return proposals with their traffic, but for those that cannot end before the best."""
    best = math.inf
    estimates: list[Proposal] = []
    for proposal in found:
        if estimates and (_late(until, 0.0) or proposal.least_s >= best * (1 + near)):
            continue
        for strategy in (proposal.strategy, proposal.across):
            if strategy is None:
                continue
            seconds = proposal.expected_s
            if not strategy.shares:
                seconds = clock.seconds(strategy, proposal.assignment)
            estimates.append(replace(proposal, strategy=strategy, expected_s=seconds, across=None))
            best = min(best, seconds)
    return estimates + _improved(costs, clock, estimates, until)


class _Clock:
    """Estimates seconds with traffic, by owners as they would be with memory for all: rooms are looked at later."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[Strategy, list[Iterations]] = {}
        self._homes: dict[Strategy, Home] = {}

    def seconds(self, strategy: Strategy, assignment: Assignment) -> float:
        """Return the seconds of an iteration."""
        if strategy not in self._known:
            homes = homes_of(self._costs, strategy)
            self._known[strategy] = [Iterations(self._costs.changed(home=home), strategy) for home in homes]
        return min(each.seconds(assignment) for each in self._known[strategy])

    def home(self, strategy: Strategy) -> Home:
        """Return who would own the state."""
        if strategy not in self._homes:
            found = home_of(self._costs, strategy, [1.0] * self._costs.ranks, self._costs.home)
            self._homes[strategy] = found or self._costs.home
        return self._homes[strategy]


def _improved(costs: Costs, clock: _Clock, estimates: Sequence[Proposal], until: float | None) -> list[Proposal]:
    """Return what the best become without some pipelines, as long as leaving more of them out gains."""
    known = {each.strategy for each in estimates}
    found: list[Proposal] = []
    for start in sorted(estimates, key=lambda each: each.expected_s)[:LEANER]:
        now = start
        while not now.strategy.shares:
            tried = []
            for each in _leaner(costs, now):
                if _late(until, 0.0):
                    return found
                if each.strategy not in known:
                    known.add(each.strategy)
                    tried.append(replace(each, expected_s=clock.seconds(each.strategy, each.assignment)))
            best = min(tried, key=lambda each: each.expected_s, default=now)
            if best.expected_s >= now.expected_s * (1 - SAVES):
                break
            found.append(best)
            now = best
    return found


def _leaner(costs: Costs, proposal: Proposal) -> Iterator[Proposal]:
    """Yield it without the pipelines of a node, and with those of one kind only, where that may end before it."""
    strategy, assignment = proposal.strategy, proposal.assignment
    nodes = [{costs.cluster.node_of(rank) for rank in pipeline.devices} for pipeline in strategy.pipelines]
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    kinds = [(form, frozenset(on)) for form, on in zip(forms, nodes, strict=True)]
    without = [tuple(node not in on for on in nodes) for node in unlike(costs, forms, nodes)]
    alone = [tuple(kind == each for each in kinds) for kind in dict.fromkeys(kinds)]
    together = max(len(batch) for batches in assignment.micro_batches for batch in batches)
    each = sum(assignment.counts) / len(nodes)
    filling = max(len(pipeline.stages) for pipeline in strategy.pipelines) - 1
    for kept in dict.fromkeys([*without, *alone]):
        share = sum(compress(assignment.counts, kept)) / sum(assignment.counts)
        if all(kept) or not share:
            continue
        # Pipelines that ran so much of the work run more micro-batches for all of it, and fill once.
        longer = (each / share + filling) / (each + filling)
        if ROUGHLY * longer * proposal.last_s >= proposal.expected_s:
            continue
        left = _some(strategy, kept)
        shared, last = share_out(costs, left, assignment.lengths, together)
        if last < proposal.expected_s:
            yield _busy(replace(proposal, strategy=left, assignment=shared, last_s=last))


def unlike(costs: Costs, forms: Sequence[object], nodes: Sequence[set[int]]) -> Iterator[int]:
    """Yield one node of each kind: alike are those that are built alike and run as many pipelines of each form.

    Args:
        forms, nodes: of each pipeline.
    """
    runs: dict[int, Counter[object]] = {}
    for form, on in zip(forms, nodes, strict=True):
        for number in on:
            runs.setdefault(number, Counter())[form] += 1
    kinds: dict[object, int] = {}
    for number in sorted(runs):
        node = costs.cluster.node(number)
        built = (node.type, node.devices, node.cards, node.inner, node.outer)
        kinds.setdefault((built, frozenset(runs[number].items())), number)
    yield from kinds.values()


def _late(until: float | None, needed_s: float) -> bool:
    """Return whether something that takes so long would end after a time."""
    return until is not None and time.monotonic() + needed_s > until


def _simulations(costs: Costs) -> int:
    """Return how many plans are simulated: fewer where that takes longer."""
    return 3 if costs.ranks <= FEW else 2 if costs.ranks <= MANY else 1

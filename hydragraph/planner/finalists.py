"""Selection of the best proposed strategies, in steps of increasing cost:

pipeline recurrence     a lower bound on every proposal's time
network cards' traffic  another lower bound on every proposal's time
estimate with traffic   of proposals whose bounds are below the best time
fewer pipelines         in the best proposals, while removing pipelines saves time
micro-batches           as a run would form them, of proposals that may be the best
memory and owners       of proposals that may be the best
simulation              of the best, and of those that may be faster
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import compress, count

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.deadline import is_late
from hydragraph.planner.micro_batch_sizes import cut, promised
from hydragraph.planner.price_candidate import (
    Candidate,
    PricedPlan,
    Shortage,
    form_of,
    owners,
    owners_by_block,
    settle,
    share_out,
)
from hydragraph.planner.price_mini_batches import quickest_home
from hydragraph.planner.state_shares import home_of
from hydragraph.planner.traffic_bound import CardBound
from hydragraph.planner.traffic_estimate import Iterations
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

FEW = 16
MANY = 64
# Estimated savings below this fraction are seldom real.
SAVES = 0.003
# Maximum plans to check during replanning.
SETTLED = 6
# Best proposals to try also with fewer pipelines.
LEANER = 3
# Maximum proposals whose micro-batches are formed before the first memory check.
CUT = 4
# The exact time is seldom below this fraction of `promised`.
PROMISED = 0.97
# Assumed ratio of exact to estimated times with fewer pipelines.
ROUGHLY = 0.95
# Slowdown by pull and push above which other owners are tried.
WAITING = 1.05
# A simulation takes as long as this many estimates.
SIMULATION = 40

# Returns how many bytes of state change owner under a home.
Moved = Callable[[Home], int]
Exactly = Callable[[PricedPlan], PricedPlan]


@dataclass(frozen=True)
class Proposal:
    """A strategy that might be the best.

    Attributes:
        last_s: end time of the last pipeline, without pull, push and update.
        expected_s, least_s: estimate of, and lower bound on, the iteration time.
        across: as in `Candidate`.
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
    """Results of the selection; the memory of `passed` proposals was not checked."""

    settled: tuple[PricedPlan, ...] = ()
    passed: tuple[Proposal, ...] = ()
    short: tuple[Shortage, ...] = ()

    @classmethod
    def of(cls, found: Iterable[PricedPlan | Shortage], passed: Iterable[Proposal]) -> Finalists:
        """Keep each strategy's best result or, if it has none, its most promising proposal."""
        settled: dict[Strategy, PricedPlan] = {}
        short: dict[Strategy, Shortage] = {}
        left: dict[Strategy, Proposal] = {}
        for one in found:
            if isinstance(one, Shortage):
                short[one.strategy] = one
            elif one.strategy not in settled or one.seconds < settled[one.strategy].seconds:
                settled[one.strategy] = one
        for proposal in sorted(passed, key=lambda each: each.expected_s):
            if proposal.strategy not in settled and proposal.strategy not in short:
                left.setdefault(proposal.strategy, proposal)
        lacking = (one for strategy, one in short.items() if strategy not in settled)
        return cls(tuple(settled.values()), tuple(left.values()), tuple(lacking))


def proposals(costs: Costs, lengths: Sequence[int], candidates: Iterable[Candidate]) -> list[Proposal]:
    """Return distinct proposals with assigned sequences, the most promising first."""
    by_strategy: dict[Strategy, Proposal] = {}
    # Assigned candidates count only if no other has their strategy.
    for candidate in sorted(candidates, key=lambda each: each.assignment is not None):
        strategy = candidate.strategy
        if strategy not in by_strategy:
            assignment, last = candidate.assignment, candidate.seconds
            if assignment is None:
                assignment, last = share_out(costs, strategy, lengths, candidate.together)
            expected = last + candidate.exposed_s
            by_strategy[strategy] = Proposal(strategy, assignment, last, expected, candidate.origin, candidate.across)
    # Without idle pipelines, proposals may be equal; keep the faster.
    every: dict[Strategy, Proposal] = {}
    cards = CardBound(costs)
    carried = (_carried(cards, _busy(first_proposal)) for first_proposal in by_strategy.values())
    for proposal in sorted(carried, key=lambda each: each.expected_s):
        every.setdefault(proposal.strategy, proposal)
    return list(every.values())


def _carried(cards: CardBound, proposal: Proposal) -> Proposal:
    strategies = [
        strategy for strategy in (proposal.strategy, proposal.across) if strategy is not None and not strategy.shares
    ]
    least = min(map(cards.least_s, strategies), default=0.0)
    return replace(proposal, expected_s=max(proposal.expected_s, least), least_s=max(proposal.last_s, least))


def _busy(proposal: Proposal) -> Proposal:
    assignment = proposal.assignment
    runs = [bool(count) for count in assignment.counts]
    if all(runs):
        return proposal
    strategies = (proposal.strategy, proposal.across)
    strategy, across = (None if whole is None else _some(whole, runs) for whole in strategies)
    assert strategy is not None, "some pipeline must run micro-batches"
    micro_batches = tuple(compress(assignment.micro_batches, runs))
    return replace(proposal, strategy=strategy, assignment=Assignment(micro_batches, assignment.lengths), across=across)


def _some(strategy: Strategy, kept: Sequence[bool]) -> Strategy:
    return Strategy(tuple(compress(strategy.pipelines, kept)), strategy.schedule)


def finalists(
    costs: Costs,
    found: Sequence[Proposal],
    near: float,
    until: float | None,
    known: dict[tuple[Strategy, Assignment], PricedPlan | Shortage],
    moved: Moved | None,
    exactly: Exactly,
    clock: TimeEstimates,
) -> list[Proposal]:
    """Choose owners and check memory for the most promising proposals, and simulate the best; return the others.

    Args:
        near: also check proposals slower than the best by at most this fraction.
        until: after this deadline, return as soon as one plan fits in memory.
        known: results, including those of earlier calls, extended in place.
        moved: if given, sorts proposals within `near` by the bytes of state that change owner.
    """
    began = time.monotonic()
    # An estimate's duration tells how many estimates and simulations fit before the deadline.
    estimates = _estimated(costs, clock, found, near, until)
    each_s = (time.monotonic() - began) / max(1, len(estimates))
    estimated = {one.strategy for one in estimates}
    others = [other for other in found if other.strategy not in estimated]
    queue = _Queue(clock, deque(sorted(others, key=lambda each: each.least_s)), until, near, moved)
    queue.add_all(estimates)
    settled: dict[Strategy, PricedPlan] = {}
    while True:
        best = min((one.seconds for one in settled.values()), default=math.inf)
        enough = len(settled) >= (SETTLED if near else _simulations(costs))
        if settled and (is_late(until) or enough):
            break
        # Without `near`, further proposals must promise to save SAVES.
        proposal = queue.next(best * (1 + (near or -SAVES)))
        if proposal is None:
            break
        if proposal.strategy in settled:
            continue
        able = len(settled) < _simulations(costs) and not is_late(until, SIMULATION * each_s)
        asked = (proposal.strategy, proposal.assignment)
        one = known.get(asked)
        # Another search may have proposed the same.
        if one is None:
            one = settle(costs, *asked, proposal.origin, proposal.expected_s)
            if isinstance(one, PricedPlan):
                one = _owned(costs, one, proposal.last_s)
        if isinstance(one, PricedPlan) and able and not one.simulated:
            one = exactly(one)
        known[asked] = one
        if isinstance(one, PricedPlan):
            settled[proposal.strategy] = one
    return [waiting for waiting in queue.left() if waiting.strategy not in settled]


@dataclass(eq=False)
class _Queue:
    """Queue of proposals. An optimistic time (`promised`) orders them first, because forming micro-batches is
    expensive.
    """

    _clock: TimeEstimates
    _others: deque[Proposal]
    _until: float | None
    _near: float
    _moved: Moved | None
    _cut: set[Strategy] = field(default_factory=set)
    _cut_s: float = 0.0
    _numbers: Iterator[int] = field(default_factory=count)
    # (seconds, insertion index, whether micro-batches must be formed, proposal)
    _heap: list[tuple[float, int, bool, Proposal]] = field(default_factory=list)

    def add_all(self, estimates: Sequence[Proposal]) -> None:
        for proposal in estimates:
            self._add(proposal.expected_s, proposal)
        for proposal in estimates:
            self._promise(proposal)

    def _add(self, seconds: float, proposal: Proposal, uncut: bool = False) -> None:
        heappush(self._heap, (seconds, next(self._numbers), uncut, proposal))

    def _promise(self, proposal: Proposal) -> None:
        if not proposal.strategy.shares and not is_late(self._until):
            best = self._clock.promised(proposal.strategy, proposal.assignment.lengths)
            # A second entry, at the time of good micro-batches, which are formed once it is first.
            self._add(PROMISED * self._clock.seconds(proposal.strategy, best), proposal, uncut=True)

    def _estimate_others(self, limit: float) -> None:
        while self._others and not math.isinf(limit) and not is_late(self._until):
            if self._others[0].least_s >= min(limit, self._heap[0][0] if self._heap else limit):
                break
            self.add_all(_estimate(self._clock, self._others.popleft()))

    def next(self, limit: float) -> Proposal | None:
        self._estimate_others(limit)
        while self._heap and self._heap[0][0] < limit:
            uncut, proposal = self._pop(limit)
            late = is_late(self._until, 2 * self._cut_s)
            done = late or bool(proposal.strategy.shares) or proposal.strategy in self._cut
            if done and not uncut:
                return proposal
            if not uncut:
                self._add(proposal.expected_s, proposal)
            if not done and (not uncut or len(self._cut) < CUT):
                began = time.monotonic()
                self._try(proposal)
                self._cut_s = max(self._cut_s, time.monotonic() - began)
            self._estimate_others(limit)
        return self._others.popleft() if self._others and math.isinf(limit) else None

    def _pop(self, limit: float) -> tuple[bool, Proposal]:
        if self._moved is None:
            return heappop(self._heap)[2:]
        # Among proposals about as fast as the first, take the one that moves least state.
        limit = min(limit, self._heap[0][0] * (1 + self._near))
        equal = [entry for entry in self._heap if entry[0] < limit] or self._heap[:1]
        homes = [self._clock.home(proposal.strategy) for *_, proposal in equal]
        _, entry = min(zip(map(self._moved, homes), equal, strict=True), key=lambda two: (two[0], *two[1][:2]))
        self._heap.remove(entry)
        heapify(self._heap)
        return entry[2:]

    def _try(self, each: Proposal) -> None:
        self._cut.add(each.strategy)
        try:
            assignment, last = self._clock.cut(each.strategy, each.assignment.lengths)
        except Unsupported:
            return
        seconds = self._clock.seconds(each.strategy, assignment)
        if seconds < each.expected_s:
            self._add(seconds, _busy(replace(each, assignment=assignment, last_s=last, expected_s=seconds)))

    def left(self) -> list[Proposal]:
        queued = [proposal for _, _, uncut, proposal in self._heap if not uncut]
        return sorted([*queued, *self._others], key=lambda each: each.expected_s)


def _owned(costs: Costs, one: PricedPlan, last_s: float) -> PricedPlan:
    strategy = one.strategy
    if strategy.shares:
        return one
    (assignment,) = one.assignments

    def seconds(home: Home) -> float:
        return Iterations(costs.changed(home=home), strategy).seconds(assignment)

    best_s = seconds(one.home)
    # Traffic is hidden, so other owners cannot save much.
    if best_s <= WAITING * last_s:
        return one
    equal = _equal_home(costs, one)
    if equal is not None and seconds(equal) < best_s * (1 - SAVES):
        choice = owners(costs, strategy, assignment, equal)
        if not isinstance(choice, Shortage):
            one = replace(one, home=equal, memory=choice[1])
            best_s = seconds(equal)
    home = one.home
    by_block = owners_by_block(
        costs, strategy, assignment, lambda other: other != home and seconds(other) < best_s * (1 - SAVES)
    )
    return one if by_block is None else replace(one, home=by_block[0], memory=by_block[1])


def _equal_home(costs: Costs, one: PricedPlan) -> Home | None:
    devices = set(one.strategy.devices)
    shares = tuple(int(rank in devices) for rank in range(costs.ranks))
    equal = replace(one.home, shares=None if all(shares) else shares)
    return None if one.home.copies > 1 or equal == one.home else equal


def _estimated(
    costs: Costs, clock: TimeEstimates, found: Sequence[Proposal], near: float, until: float | None
) -> list[Proposal]:
    best = math.inf
    estimates: list[Proposal] = []
    for proposal in found:
        if estimates and (is_late(until) or proposal.least_s >= best * (1 + near)):
            continue
        both = _estimate(clock, proposal)
        estimates += both
        best = min([best, *(each.expected_s for each in both)])
    return estimates + _improved(costs, clock, estimates, until)


def _estimate(clock: TimeEstimates, proposal: Proposal) -> list[Proposal]:
    strategies = [strategy for strategy in (proposal.strategy, proposal.across) if strategy is not None]
    seconds = (proposal.expected_s if s.shares else clock.seconds(s, proposal.assignment) for s in strategies)
    return [
        replace(proposal, strategy=strategy, expected_s=expected_s, across=None)
        for strategy, expected_s in zip(strategies, seconds, strict=True)
    ]


class TimeEstimates:
    """Cached micro-batches and times of strategies, ignoring the owners' memory."""

    def __init__(self, costs: Costs) -> None:
        def home(strategy: Strategy) -> Home:
            return home_of(costs, strategy, [1.0] * costs.ranks, costs.home) or costs.home

        estimator = cache(partial(quickest_home, costs))
        self.home = cache(home)
        self.cut = cache(partial(cut, costs))
        self.promised = cache(partial(promised, costs))
        self.seconds = cache(lambda strategy, assignment: estimator(strategy)(assignment))


def _improved(costs: Costs, clock: TimeEstimates, estimates: Sequence[Proposal], until: float | None) -> list[Proposal]:
    seen_strategies = {proposal.strategy for proposal in estimates}
    improved: list[Proposal] = []
    for start in sorted(estimates, key=lambda each: each.expected_s)[:LEANER]:
        now = start
        while not now.strategy.shares:
            tried = []
            for leaner in _leaner(costs, now):
                if is_late(until):
                    return improved
                if leaner.strategy not in seen_strategies:
                    seen_strategies.add(leaner.strategy)
                    tried.append(replace(leaner, expected_s=clock.seconds(leaner.strategy, leaner.assignment)))
            best = min(tried, key=lambda each: each.expected_s, default=now)
            if best.expected_s >= now.expected_s * (1 - SAVES):
                break
            improved.append(best)
            now = best
    return improved


def _leaner(costs: Costs, proposal: Proposal) -> Iterator[Proposal]:
    strategy = proposal.strategy
    assignment = proposal.assignment
    nodes = [{costs.cluster.node_of(rank) for rank in pipeline.devices} for pipeline in strategy.pipelines]
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    kinds = [(form, frozenset(on)) for form, on in zip(forms, nodes, strict=True)]
    without = [tuple(node not in on for on in nodes) for node in unlike(costs, forms, nodes)]
    alone = [tuple(kind == other for other in kinds) for kind in dict.fromkeys(kinds)]
    together = max(len(batch) for batches in assignment.micro_batches for batch in batches)
    per_pipeline = sum(assignment.counts) / len(nodes)
    filling = max(len(pipeline.stages) for pipeline in strategy.pipelines) - 1
    for kept in dict.fromkeys([*without, *alone]):
        share = sum(compress(assignment.counts, kept)) / sum(assignment.counts)
        if all(kept) or not share:
            continue
        # The other pipelines run more micro-batches, but fill as quickly.
        longer = (per_pipeline / share + filling) / (per_pipeline + filling)
        if ROUGHLY * longer * proposal.last_s >= proposal.expected_s:
            continue
        left = _some(strategy, kept)
        shared, last = share_out(costs, left, assignment.lengths, together)
        if last < proposal.expected_s:
            yield _busy(replace(proposal, strategy=left, assignment=shared, last_s=last))


def unlike(costs: Costs, forms: Sequence[object], nodes: Sequence[set[int]]) -> Iterator[int]:
    """Yield one node of each set of nodes that have equal hardware and run equal pipelines."""
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


def _simulations(costs: Costs) -> int:
    return 3 if costs.ranks <= FEW else 2 if costs.ranks <= MANY else 1

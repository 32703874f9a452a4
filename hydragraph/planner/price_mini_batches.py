"""Estimated and simulated times of strategies for mini-batches with sequences of varying lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.assignment.equal_sequences import equally_long
from hydragraph.planner.assignment.spread_search import SearchEffort
from hydragraph.planner.deadline import is_late
from hydragraph.planner.price_candidate import PricedPlan, Shortage, form_of, held, owners, owners_by_block
from hydragraph.planner.state_shares import homes_of
from hydragraph.planner.traffic_estimate import Iterations
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

T = TypeVar("T")

QUICK = SearchEffort(kicks=1, enough=2e-2)
SIMULATED = 3
# Maximum reassignments while a rank has too little memory.
ROUNDS = 8
# Maximum ranks for which strategies are simulated.
FEW = 128


class MiniBatchPrices:
    """Cached times of strategies for sample mini-batches, under the home of `costs`."""

    def __init__(self, costs: Costs, batches: Sequence[Sequence[int]]) -> None:
        self.costs = costs
        self.batches = tuple(tuple(batch) for batch in batches)
        self.priced: dict[Strategy, tuple[float, ...]] = {}
        self._pipelines: dict[object, PipelineCost] = {}
        self._at_home: dict[Home, MiniBatchPrices] = {costs.home: self}

    def by_batch(self, strategy: Strategy, below_s: float = math.inf) -> tuple[float, ...]:
        """Return the approximate time of every mini-batch, infinite if it does not fit.

        If the mean time without traffic reaches `below_s`, all times are infinite.
        """
        if strategy not in self.priced:
            pipelines = self.pipelines(strategy)
            reach = max(pipeline.max_len for pipeline in pipelines)
            assigned = {
                batch: assign_pipelines(pipelines, batch, effort=QUICK)
                for batch in dict.fromkeys(self.batches)
                if max(batch) <= reach
            }
            alone = mean([assigned[b].seconds if b in assigned else math.inf for b in self.batches])
            if math.isfinite(below_s) and alone >= below_s:
                return (math.inf,) * len(self.batches)
            traffic = quickest_home(self.costs, strategy)
            self.priced[strategy] = self._of_each(lambda b: traffic(assigned[b]) if b in assigned else math.inf)
        return self.priced[strategy]

    def seconds(self, strategy: Strategy, below_s: float = math.inf) -> float:
        return mean(self.by_batch(strategy, below_s))

    def settle(
        self, strategy: Strategy, origin: str, home: Home | None = None, simulating: bool = True
    ) -> PricedPlan | Shortage:
        """Choose owners, compute memory, and simulate every mini-batch with the iteration planner's assignment."""
        simulating = simulating and self.costs.ranks <= FEW
        useful = max(max(profile.util.values(), default=1) for profile in self.costs.profiles)
        counts = [2 * len(p.stages) for p in strategy.pipelines]
        usual = Assignment.even(counts, min(max(useful, 256), max(map(max, self.batches))))
        choice = owners(self.costs, strategy, usual, home)
        by_block = owners_by_block(self.costs, strategy, usual) if home is None and not strategy.streams else None
        choices = [] if isinstance(choice, Shortage) else [choice]
        if by_block is not None and by_block not in choices:
            choices.append(by_block)
        choices.sort(key=lambda each: traffic_in_line(self.costs.changed(home=each[0]), strategy)(usual))
        found: PricedPlan | Shortage = Shortage(strategy, 0, math.inf)
        for owned, memory in choices:
            found = self._settle_under(owned, memory, strategy, origin, simulating)
            if isinstance(found, PricedPlan):
                return found
        return choice if isinstance(choice, Shortage) else found

    def _settle_under(
        self, home: Home, memory: tuple[int, ...], strategy: Strategy, origin: str, simulating: bool
    ) -> PricedPlan | Shortage:
        if home not in self._at_home:
            self._at_home[home] = MiniBatchPrices(self.costs.changed(home=home), self.batches)
        owned = self._at_home[home]
        ranks = range(self.costs.ranks)
        beside = lacks = 0.0
        for _ in range(ROUNDS):
            pipelines = owned.pipelines(strategy, beside)
            assigned_batches = self._of_each(partial(_assigned, owned.costs, strategy, pipelines, simulating))
            assignments, seconds = zip(*assigned_batches, strict=True)
            runs = [a for a, iteration_seconds in dict.fromkeys(assigned_batches) if math.isfinite(iteration_seconds)]
            memory = held(self.costs, strategy, home, runs) if runs else memory
            lacks = max(memory[rank] - self.costs.memory_of(rank) for rank in ranks)
            if lacks <= 0:
                return PricedPlan(strategy, home, assignments, seconds, memory, origin, simulated=simulating)
            # MaxLen ignores messages and the rest of the mini-batch.
            beside = 2 * beside + lacks
        worst = max(ranks, key=lambda rank: memory[rank] - self.costs.memory_of(rank))
        return Shortage(strategy, worst, lacks)

    def settle_equally(self, strategy: Strategy) -> PricedPlan | Shortage:
        """Price a strategy with equal work for all pipelines, under the home of `costs`."""
        pipelines = self.pipelines(strategy)
        longest = min(pipeline.max_len for pipeline in pipelines)
        slowest = max(pipelines, key=lambda pipeline: pipeline.micro_batch_seconds([max(longest, 1)]))
        alike = [replace(slowest, max_len=longest)] * len(pipelines)
        costs = self.costs
        simulating = costs.ranks <= FEW
        assigned_batches = self._of_each(partial(_assigned, costs, strategy, alike, simulating))
        assignments, seconds = zip(*assigned_batches, strict=True)
        runs = [a for a, iteration_seconds in dict.fromkeys(assigned_batches) if math.isfinite(iteration_seconds)]
        memory = held(costs, strategy, costs.home, runs) if runs else (0,) * costs.ranks
        worst = max(range(costs.ranks), key=lambda rank: memory[rank] - costs.memory_of(rank))
        lacks = memory[worst] - costs.memory_of(worst)
        if lacks > 0:
            return Shortage(strategy, worst, lacks)
        return PricedPlan(strategy, costs.home, assignments, seconds, memory, "usual", simulated=simulating)

    def _of_each(self, of: Callable[[tuple[int, ...]], T]) -> tuple[T, ...]:
        value_by_batch = {batch: of(batch) for batch in dict.fromkeys(self.batches)}
        return tuple(value_by_batch[batch] for batch in self.batches)

    def pipelines(self, strategy: Strategy, beside: float = 0.0) -> Sequence[PipelineCost]:
        if beside:
            whole = strategy if strategy.shares else None
            limits = {p: self.costs.max_len(p, whole, beside) for p in strategy.pipelines}
            priced_pipelines = zip(strategy.pipelines, self.pipelines(strategy), strict=True)
            return [replace(cost, max_len=min(cost.max_len, limits[p])) for p, cost in priced_pipelines]
        # Here, a pipeline's time depends on others
        if strategy.shares:
            return self.costs.pipelines(strategy)
        pipeline_costs = []
        for pipeline in strategy.pipelines:
            form = form_of(self.costs, pipeline), strategy.schedule
            if form not in self._pipelines:
                self._pipelines[form] = self.costs.pipeline(pipeline, strategy.schedule)
            pipeline_costs.append(self._pipelines[form])
        return pipeline_costs


def settle_best(
    varied: MiniBatchPrices,
    origins: Mapping[Strategy, str],
    until: float | None,
    known: dict[Strategy, PricedPlan | Shortage],
    most: int = SIMULATED,
) -> None:
    """Check strategies, the lowest estimate first, until `most` fit all mini-batches.

    After the deadline `until`, stop at the first strategy that fits, without simulation.
    """
    order = list(origins)
    if not is_late(until):
        order.sort(key=lambda s: (math.inf, math.inf) if is_late(until) else _rank(varied.by_batch(s)))
    able = 0
    for strategy in order:
        if able >= most or (is_late(until) and any(map(_takes_all, known.values()))):
            return
        if strategy not in known:
            known[strategy] = varied.settle(strategy, origins[strategy], simulating=not is_late(until))
        able += _takes_all(known[strategy])


def _takes_all(found: PricedPlan | Shortage) -> bool:
    return isinstance(found, PricedPlan) and math.isfinite(found.seconds)


def mean(by_batch: Sequence[float]) -> float:
    return math.fsum(by_batch) / len(by_batch)


def _rank(by_batch: Sequence[float]) -> tuple[float, float]:
    able = [seconds for seconds in by_batch if math.isfinite(seconds)]
    return len(by_batch) - len(able), mean(able) if able else math.inf


def _assigned(
    owned: Costs, strategy: Strategy, pipelines: Sequence[PipelineCost], simulating: bool, batch: Sequence[int]
) -> tuple[Assignment, float]:
    try:
        if len(set(batch)) == 1:
            assignment, _ = equally_long(pipelines, batch)
        else:
            planned = assign_pipelines(pipelines, batch)
            assignment = Assignment(planned.micro_batches, planned.lengths)
    except Unsupported:
        return Assignment(((),) * len(pipelines), tuple(batch)), math.inf
    if simulating:
        return assignment, owned.simulate(strategy, assignment).seconds
    return assignment, traffic_in_line(owned, strategy)(assignment)


def quickest_home(costs: Costs, strategy: Strategy) -> Callable[[Assignment], float]:
    """Return a function that estimates the iteration time with the best owners, ignoring memory."""
    estimators = [traffic_in_line(costs.changed(home=home), strategy) for home in homes_of(costs, strategy)]
    return lambda assignment: min(seconds(assignment) for seconds in estimators)


def traffic_in_line(owned: Costs, strategy: Strategy) -> Callable[[Assignment], float]:
    """Return a function that estimates iteration times, by simulation if stages are shared, stream or offload."""
    if strategy.shares or strategy.streams or strategy.offloads:
        return lambda assignment: owned.simulate(strategy, assignment).seconds
    return Iterations(owned, strategy).seconds

"""Search for a good plan within a fraction of a second, while a run waits.

The result is the fastest candidate that fits in memory, of

- the running and earlier strategies, if they use no lost rank;
- the running strategy without slow pipelines, or with them rebuilt (with or without slow ranks);
- simple plans (`symmetric`), and plans for equal sequences of a typical length.

Candidates are estimated in the order of approximate times, for which the mini-batch is assigned longest first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines
from hydragraph.planner.assignment.local_search import quick_end
from hydragraph.planner.assignment.problem import problem_of
from hydragraph.planner.generators.group_prices import SAFETY
from hydragraph.planner.generators.malleus_autohet import STRAGGLER, TOGETHER, search, sizes_of
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.improve_devices import DeviceMoves
from hydragraph.planner.micro_batch_sizes import pipeline_costs
from hydragraph.planner.price_candidate import placed_candidates, unlike
from hydragraph.planner.price_mini_batches import QUICK, traffic_in_line
from hydragraph.planner.traffic_bound import CardBound
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

AT_ONCE_S = 0.3  # default deadline
# Maximum known strategies to estimate
RUNNING = 3
# Minimum number of estimates
FEWEST = 8
# Strategies above this multiple of the best approximate time are not estimated
FAR = 1.5
# Fraction of the deadline for the search
SEARCHING = 0.6
# If a rank's rate is above this, also try plans without it
SLOW = 1.5


@dataclass(frozen=True)
class Estimate:
    """Predicted iteration time of a strategy that fits, with a typical mini-batch."""

    strategy: Strategy
    pipelines: tuple[PipelineCost, ...]
    assignment: PlannedAssignment
    seconds: float

    @property
    def charge(self) -> float:
        return max(0.0, self.seconds - self.assignment.seconds)


def plan_at_once(
    costs: Costs, workload: Workload, others: Sequence[Strategy], deadline_s: float = AT_ONCE_S
) -> Estimate | None:
    """Return the best strategy found, if any.

    Args:
        others: further candidates, the running strategy first; ranks outside the cluster count as lost.
        deadline_s: seconds after which no estimate starts, unless fewer than `FEWEST` exist.
    """
    began = time.monotonic()
    batch = sample(workload)
    promising = _promising(costs, workload, began + SEARCHING * deadline_s)
    cards = CardBound(costs)
    candidates: list[tuple[float, Strategy, tuple[PipelineCost, ...]]] = []
    for strategy in dict.fromkeys([*_near(costs, workload, others), *promising]):
        pipelines = pipeline_costs(costs, strategy)
        # The longest sequence fits, as the search found
        if strategy in promising:
            pipelines = tuple(replace(p, max_len=max(p.max_len, workload.longest)) for p in pipelines)
        if _fits(pipelines, workload):
            end = quick_end(problem_of(pipelines, batch, formed=True).instance) + promising.get(strategy, 0.0)
            traffic = 0.0 if strategy.shares else cards.least_s(strategy)
            candidates.append((max(end, traffic), strategy, pipelines))
    seconds: dict[Strategy, float] = {}
    candidates.sort(key=lambda each: each[0])
    best = math.inf
    for end, strategy, pipelines in candidates:
        if end > FAR * best or (len(seconds) >= FEWEST and time.monotonic() > began + deadline_s):
            break
        assignment = assign_pipelines(pipelines, batch, effort=QUICK)
        # Estimate traffic only of strategies that may be fastest.
        is_slower = assignment.seconds >= best
        seconds[strategy] = assignment.seconds if is_slower else traffic_in_line(costs, strategy)(assignment)
        best = min(best, seconds[strategy])
    for strategy in sorted((each[1] for each in candidates), key=lambda each: seconds.get(each, math.inf)):
        try:
            pipelines = costs.pipelines(strategy)
        except Unsupported:
            continue
        if _fits(pipelines, workload):
            assignment = assign_pipelines(pipelines, batch)
            return Estimate(strategy, pipelines, assignment, traffic_in_line(costs, strategy)(assignment))
    return None


def _fits(pipelines: Sequence[PipelineCost], workload: Workload) -> bool:
    limits = [pipeline.max_len for pipeline in pipelines]
    return min(limits) > 0 and max(limits) >= workload.longest


def sample(workload: Workload) -> tuple[int, ...]:
    """Return the mini-batch with the median attention work."""
    ordered = sorted(workload.batches, key=lambda batch: sum(n * n for n in batch))
    return ordered[len(ordered) // 2]


def _near(costs: Costs, workload: Workload, others: Sequence[Strategy]) -> list[Strategy]:
    def rate(rank: int) -> float:
        return costs.health.rate(rank) if rank < costs.ranks else math.inf

    every = [s for s in dict.fromkeys(others) if all(math.isfinite(rate(d)) for d in s.devices)][:RUNNING]
    first = next(iter(others), None)
    if first is None or first.shares:
        return every
    slow = [p for p in first.pipelines if any(rate(rank) > SLOW for rank in p.devices)]
    if not slow:
        return every
    device_moves = DeviceMoves(costs, workload, workload.longest, SAFETY)
    number = len(first.pipelines)
    for most in (SLOW, math.inf, 0.0):
        kept = [[r for r in p.devices if rate(r) <= most and math.isfinite(rate(r))] for p in slow]
        anew = [device_moves.laid_anew(p, devices, number) for p, devices in zip(slow, kept, strict=True)]
        pipelines = [*(p for p in first.pipelines if p not in slow), *(p for p in anew if p is not None)]
        if pipelines:
            every.append(replace(first, pipelines=tuple(sorted(pipelines, key=lambda p: min(p.devices)))))
    return list(dict.fromkeys(every))


def _promising(costs: Costs, workload: Workload, until: float) -> dict[Strategy, float]:
    """Return strategies, and how long their pipelines wait for pull and push."""
    typical = workload.typical
    count = typical.sequences
    length = typical.length
    way = TOGETHER if len(costs.cluster.types) > 1 else STRAGGLER
    searched = unlike(search(costs, count, length, way, reach=workload.longest, until=until))
    sizes, _ = sizes_of(costs, count, length)
    plain = simple(costs, count, length, sizes, workload.longest, SAFETY)
    return {candidate.strategy: candidate.exposed_s for candidate in [*plain, *placed_candidates(searched)]}

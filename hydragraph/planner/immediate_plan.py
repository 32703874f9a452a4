"""Search for a good plan within a fraction of a second, while a run waits.

The result is the fastest candidate that fits in memory:

- the running and earlier strategies, if they use no lost rank;
- the running strategy without slow pipelines, or with them rebuilt (with or without slow ranks);
- results of the search for equal sequences of a typical length, and simple plans (`symmetric`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines
from hydragraph.planner.assignment.spread_search import SearchEffort
from hydragraph.planner.finalists import proposals
from hydragraph.planner.generators.group_prices import SAFETY
from hydragraph.planner.generators.malleus_autohet import STRAGGLER, TOGETHER, search, sizes_of
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.improve_devices import DeviceMoves
from hydragraph.planner.micro_batch_sizes import pipeline_costs
from hydragraph.planner.price_candidate import placed_candidates, unlike
from hydragraph.planner.price_mini_batches import QUICK, traffic_in_line
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

AT_ONCE_S = 0.3  # default deadline
RUNNING = 3  # maximum known strategies to estimate
MOST = 4  # maximum new strategies to estimate
FEWEST = 5  # minimum number of estimates
SEARCHING = 0.6  # fraction of the deadline for the search
SLOW = 1.5  # rate above which plans without the rank are also tried


@dataclass(frozen=True)
class Estimate:
    """Predicted time of a strategy that fits.

    Attributes:
        seconds: iteration time with a typical mini-batch.
    """

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
    """Return the best strategy found within about `deadline_s`, if any.

    Args:
        others: further candidates, the running strategy first; ranks outside the cluster count as lost.
        deadline_s: seconds after which no estimate starts, unless fewer than `FEWEST` exist.
    """
    began = time.monotonic()
    batch = sample(workload)
    promising = _promising(costs, workload, began + SEARCHING * deadline_s)
    near = [s for s in _near(costs, workload, others) if s not in promising]
    in_turns = [s for pair in zip_longest(near, promising) for s in pair if s is not None]
    estimates: list[Estimate] = []
    for strategy in in_turns:
        if len(estimates) >= FEWEST and time.monotonic() > began + deadline_s:
            break
        pipelines = pipeline_costs(costs, strategy, workload.longest if strategy in promising else None)
        if max(p.max_len for p in pipelines) >= workload.longest and min(p.max_len for p in pipelines) > 0:
            estimates.append(_estimate(costs, strategy, pipelines, batch, QUICK))
    for estimate in sorted(estimates, key=lambda one: one.seconds):
        try:
            pipelines = costs.pipelines(estimate.strategy)
        except Unsupported:
            continue
        limits = [p.max_len for p in pipelines]
        if min(limits) > 0 and max(limits) >= workload.longest:
            return _estimate(costs, estimate.strategy, pipelines, batch, None)
    return None


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


def _promising(costs: Costs, workload: Workload, until: float) -> list[Strategy]:
    typical = workload.typical
    count = typical.sequences
    length = typical.length
    way = TOGETHER if len(costs.cluster.types) > 1 else STRAGGLER
    some = unlike(search(costs, count, length, way, reach=workload.longest, until=until))[:MOST]
    sizes, _ = sizes_of(costs, count, length)
    plain = simple(costs, count, length, sizes, workload.longest, SAFETY)
    ranked_proposals = proposals(costs, typical.batches[0], [*placed_candidates(some), *plain])
    return [proposal.strategy for proposal in ranked_proposals[:MOST]]


def _estimate(
    costs: Costs,
    strategy: Strategy,
    pipelines: tuple[PipelineCost, ...],
    batch: Sequence[int],
    effort: SearchEffort | None,
) -> Estimate:
    assignment = assign_pipelines(pipelines, batch, effort=effort)
    return Estimate(strategy, pipelines, assignment, traffic_in_line(costs, strategy)(assignment))

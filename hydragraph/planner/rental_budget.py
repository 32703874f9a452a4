"""Choice of nodes to rent within a budget, for the fastest step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.cluster_parts import kind_of
from hydragraph.planner.iteration_bound import bound
from hydragraph.planner.plan import NEAR, Plan
from hydragraph.planner.rental_price import RentalPrices, per_million_tokens
from hydragraph.spec.home import Home
from hydragraph.spec.training_workload import Workload

ROUNDING = 1e-9
# Maximum combinations of nodes to compare, and incomplete ones to examine.
MOST = 256
EXAMINED = 5_000


@dataclass(frozen=True)
class RentalOffer:
    costs: Costs
    prices: RentalPrices
    plan: Plan

    @property
    def per_hour(self) -> float:
        return self.prices.hour(range(self.costs.ranks))

    @property
    def devices(self) -> str:
        """Devices by type, such as "4 h100-sxm + 24 l4"."""
        types = Counter(map(self.costs.cluster.type_of, range(self.costs.ranks)))
        return " + ".join(f"{count} {name}" for name, count in types.items())

    def sentence(self, workload: Workload) -> str:
        million = per_million_tokens(self.per_hour, self.plan.seconds, workload)
        speed = f"{self.plan.seconds:.4g} s per step, ${million:.4g} per million tokens"
        return f"{self.devices} for ${self.per_hour:.4g} an hour: {speed}"


def offers(
    costs: Costs, workload: Workload, prices: RentalPrices, budget: float, plan: Callable[[Costs], Plan]
) -> list[RentalOffer]:
    """Return plans within a budget (dollars per hour), the fastest first.

    Raises:
        Unsupported: no combination of nodes has a plan that fits.
    """
    rental_offers: list[RentalOffer] = []
    refused: Unsupported | None = None
    every = [
        costs.of_ranks(ranks, Home(copies=costs.home.copies)) for ranks in affordable(costs, workload, prices, budget)
    ]
    least = [bound(some, workload.batches) for some in every]
    for i in sorted(range(len(every)), key=least.__getitem__):
        if rental_offers and least[i] >= min(offer.plan.seconds for offer in rental_offers):
            break
        try:
            some, chosen = _without_idle_nodes(every[i], plan)
            rental_offers.append(RentalOffer(some, replace(prices, cluster=some.cluster), chosen))
        except Unsupported as error:
            refused = refused or error
    if not rental_offers:
        assert refused is not None, "the budget must pay for at least one node"
        raise refused
    return sorted(rental_offers, key=lambda each: each.plan.seconds)


def _without_idle_nodes(costs: Costs, plan: Callable[[Costs], Plan]) -> tuple[Costs, Plan]:
    whole = plan(costs)
    used = {costs.cluster.node_of(rank) for rank in whole.strategy.devices}
    kept = [rank for rank in range(costs.ranks) if costs.cluster.node_of(rank) in used]
    if len(kept) == costs.ranks:
        return costs, whole
    some = costs.of_ranks(kept, Home(copies=costs.home.copies))
    try:
        chosen = plan(some)
    except Unsupported:
        return costs, whole
    return (some, chosen) if chosen.seconds <= whole.seconds * (1 + NEAR) else (costs, whole)


def affordable(costs: Costs, workload: Workload, prices: RentalPrices, budget: float) -> list[tuple[int, ...]]:
    """Return the ranks of each combination of whole nodes that the budget pays for and to which no node can be added.

    If there are more than `MOST`, return those with the most computing power.
    """
    prices.check_budget(budget, costs.health.lost)
    kinds: dict[object, list[list[int]]] = {}
    for number, ranks in prices.nodes(costs.health.lost).items():
        kinds.setdefault(kind_of(costs, number), []).append(ranks)
    every = list(kinds.values())
    node_prices = [prices.hour(alike[0]) for alike in every]
    powers = [1 / bound(costs.of_ranks(alike[0], Home()), workload.batches) for alike in every]
    combinations = _maximal(node_prices, [len(alike) for alike in every], powers, budget)
    return [
        tuple(
            sorted(rank for alike, count in zip(every, counts, strict=True) for some in alike[:count] for rank in some)
        )
        for counts in islice(combinations, MOST)
    ]


def _maximal(
    each: Sequence[float], most: Sequence[int], powers: Sequence[float], budget: float
) -> Iterator[tuple[int, ...]]:
    """Yield the maximal numbers of nodes of each kind, the most powerful first."""
    limit = budget * (1 + ROUNDING)
    kinds = sorted(range(len(each)), key=lambda kind: each[kind] / powers[kind] if powers[kind] else math.inf)

    def numbers(kind: int, left: float) -> range:
        if not each[kind]:
            return range(most[kind], most[kind] + 1)
        return range(min(most[kind], int(left / each[kind])) + 1)

    def highest(counts: Sequence[int], left: float) -> float:
        """Return an upper bound on the power of combinations that begin with `counts`."""
        power = math.fsum(powers[kind] * count for kind, count in zip(kinds, counts, strict=False))
        for kind in kinds[len(counts) :]:
            count = min(most[kind], left / each[kind]) if each[kind] else most[kind]
            power += powers[kind] * count
            left -= each[kind] * count
        return power

    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found = False
    examined = 0
    while heap and (examined < EXAMINED or not found):
        examined += 1
        # Without a result, complete the combination with most nodes.
        if examined > EXAMINED:
            heap = [max(heap, key=lambda each: (len(each[1]), each[1]))]
        _, counts = heappop(heap)
        left = limit - math.fsum(each[kind] * count for kind, count in zip(kinds, counts, strict=False))
        if len(counts) == len(kinds):
            if not any(count < most[kind] and each[kind] <= left for kind, count in zip(kinds, counts, strict=True)):
                found = True
                yield tuple(count for _, count in sorted(zip(kinds, counts, strict=True)))
            continue
        kind = kinds[len(counts)]
        for count in numbers(kind, left):
            heappush(heap, (-highest((*counts, count), left - each[kind] * count), (*counts, count)))

"""The price of training under a plan, per hour and per million tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydragraph.spec.cluster import Cluster
from hydragraph.spec.training_workload import Workload

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.planner.plan import Plan


@dataclass(frozen=True)
class RentalPrices:
    """Prices of renting devices, in dollars per device and hour, by type."""

    cluster: Cluster
    per_hour: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str], cluster: Cluster) -> RentalPrices:
        """Read texts such as "h100-sxm=2.5", or "2.5" for all other types."""
        named: dict[str, float] = {}
        for text in texts:
            name, _, number = text.rpartition("=")
            if name in named:
                raise ValueError(f"--price {text!r}: {name or 'the price of all types'} is given twice: keep one")
            try:
                named[name] = float(number)
            except ValueError:
                named[name] = math.nan
            if not 0 <= named[name] < math.inf:
                raise ValueError(f"--price {text!r}: give dollars per hour, as in h100-sxm=2.5, or 2.5 for all types")
            if name and name not in cluster.types:
                raise ValueError(f"--price {text!r}: the cluster has no type {name!r}, only {', '.join(cluster.types)}")
        per_hour = {name: named.get(name, named.get("", math.nan)) for name in cluster.types}
        without = [name for name, price in per_hour.items() if math.isnan(price)]
        if without:
            raise ValueError(f"{without[0]} has no price: add --price {without[0]}=DOLLARS")
        return cls(cluster, per_hour)

    def check_budget(self, budget: float, lost: Collection[int] = ()) -> None:
        """Raise a ValueError if `budget` dollars per hour do not pay for a node without its `lost` ranks."""
        if not 0 <= budget < math.inf:
            raise ValueError(f"--budget {budget:g}: give dollars per hour, such as 20")
        node_prices = [self.hour(ranks) for ranks in self.nodes(lost).values()]
        if not node_prices:
            raise ValueError("--health lists all ranks as lost: keep at least one")
        if min(node_prices) > budget:
            raise ValueError(f"--budget {budget:g}: the cheapest node costs ${min(node_prices):.4g} an hour")

    def nodes(self, lost: Collection[int]) -> dict[int, list[int]]:
        nodes = self.cluster.ranks_by_node.items()
        running = {number: [rank for rank in ranks if rank not in lost] for number, ranks in nodes}
        return {number: ranks for number, ranks in running.items() if ranks}

    def hour(self, ranks: Iterable[int]) -> float:
        return math.fsum(self.per_hour[self.cluster.type_of(rank)] for rank in set(ranks))

    def sentences(self, costs: Costs, plan: Plan, workload: Workload) -> list[str]:
        from hydragraph.planner.state_shares import needed_ranks

        ranks = needed_ranks(costs, plan.strategy, plan.home)
        own = per_million_tokens(self.hour(ranks), plan.seconds, workload)
        hour = f"${self.hour(ranks):.4g} an hour for {len(ranks)} device{'s' * (len(ranks) > 1)}"
        said = [f"price: {hour}, ${own:.4g} per million tokens"]
        priced = []
        for rival in plan.rivals:
            if math.isfinite(rival.seconds):
                home = None if rival.settled is None else rival.settled.home
                used = rival.strategy.devices if home is None else needed_ranks(costs, rival.strategy, home)
                priced.append((per_million_tokens(self.hour(used), rival.seconds, workload), rival))
        least, cheapest = min(priced, key=lambda pair: pair[0], default=(math.inf, None))
        if cheapest is None or least >= own:
            return [*said, "price: none of the rivals costs less per token"]
        longer = cheapest.seconds / plan.seconds - 1
        takes = f"{longer:.1%} longer" if longer > 0 else f"{-longer:.1%} less time"
        return [*said, f"price: {cheapest.strategy.name} costs {1 - least / own:.1%} less per token, and takes {takes}"]


def per_million_tokens(per_hour: float, seconds: float, workload: Workload) -> float:
    tokens = math.fsum(map(sum, workload.batches)) / len(workload.batches)
    return per_hour * seconds / 3600 / tokens * 1e6

"""Short explanation of a plan, and of why other strategies are slower."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.device_time import device_time, main_cause
from hydragraph.planner.explanation import SHOWN, pipeline_text
from hydragraph.planner.generators.symmetric import common_degrees
from hydragraph.planner.plan import Plan
from hydragraph.planner.price_candidate import PricedPlan, Shortage
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.planner.state_shares import fractions
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

PLAIN = "plain data parallelism"
# Least ratio of largest to smallest share that counts as unequal
UNEVEN = 1.1


def brief_explanation(costs: Costs, workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Return at most five lines: the plan, its time and memory, and why each usual strategy is slower."""
    tightest = max(range(costs.ranks), key=lambda rank: plan.memory[rank] / plan.limits[rank])
    error = costs.error_of(plan.strategy)
    lines = [
        f"plan: {_in_words(costs, plan)}",
        f"expected: {plan.seconds:.3g} s per step; tightest memory: rank {tightest} with "
        f"{plan.memory[tightest] / 1e9:.3g} of {plan.limits[tightest] / 1e9:.3g} GB{'; ' * bool(error)}{error}",
    ]
    varied = MiniBatchPrices(costs, workload.batches)
    compared = _Compared(varied, plan)
    uneven = any(_shares(costs, plan))
    for name, strategy in _usual(varied, plan.strategy).items():
        if isinstance(strategy, str):
            lines.append(f"{name}: {strategy}")
            continue
        equally = name == PLAIN and uneven
        verdict, _ = compared.verdict(strategy, equally=equally)
        lines.append(f"{name}: {strategy.name}{' with equal shares' * equally} {verdict}")
    return tuple(lines)


def _shares(costs: Costs, plan: Plan) -> list[str]:
    pipelines = plan.strategy.pipelines
    tokens = [sum(map(sum, batches)) for batches in plan.assignment.tokens]
    owned = fractions(costs, plan.home)
    state = [sum(owned[rank] for rank in {*pipeline.devices}) for pipeline in pipelines]
    parts = [""] * len(pipelines)
    for name, shares, compared in (("tokens", tokens, tokens), ("the state", state, owned)):
        if max(compared) > UNEVEN * min(compared):
            parts = [f"{part}, {share / sum(shares):.0%} of {name}" for part, share in zip(parts, shares, strict=True)]
    return parts


def _in_words(costs: Costs, plan: Plan) -> str:
    shares = _shares(costs, plan)
    texts = [pipeline_text(costs, pipeline) for pipeline in plan.strategy.pipelines]
    counts = Counter(text + share for text, share in zip(texts, shares, strict=True))
    pipelines = " + ".join(f"{count} x [{text}]" if count > 1 else f"[{text}]" for text, count in counts.items())
    more = len(plan.strategies) - 1
    also = f", plus faster strategies for some mini-batches ({more})" if more else ""
    idle = sorted(set(range(costs.ranks)) - set(plan.strategy.devices))
    if not idle:
        return f"{plan.strategy.name}: {pipelines}{also}"
    shown = ", ".join(map(str, idle[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
    small = all(costs.memory_of(rank) < min(plan.memory[r] for r in plan.strategy.devices) for rank in idle)
    why = "too little memory for a stage" if small else "they would slow down a step"
    return f"{plan.strategy.name}: {pipelines}{also}; idle: {shown} ({why})"


def _usual(varied: MiniBatchPrices, chosen: Strategy) -> Mapping[str, Strategy | str]:
    costs = varied.costs
    equal = _equal(costs)
    strategies: dict[str, Strategy | str] = {}
    if (1, 1) in equal:
        strategies[PLAIN] = equal[1, 1]
    widest = max((tp for tp, stages in equal if stages == 1), default=1)
    if widest > 1:
        strategies["plain tensor parallelism"] = equal[widest, 1]
    elif costs.ranks > 1:
        strategies["plain tensor parallelism"] = f"cannot run: {_why_no_tensor_parallelism(costs)}"
    seconds = {}
    for strategy in equal.values():
        if strategy not in strategies.values() and strategy != chosen:
            with suppress(Unsupported):
                seconds[strategy] = varied.seconds(strategy)
    if seconds:
        strategies["fastest alternative with identical pipelines"] = min(seconds, key=seconds.__getitem__)
    return strategies


def _why_no_tensor_parallelism(costs: Costs) -> str:
    counts = Counter(device.node for device in costs.cluster.devices).values()
    if max(counts) == 1:
        return "no node has two equal devices"
    if math.gcd(*counts) == 1:
        return f"only degree 1 divides the nodes' device counts ({', '.join(map(str, sorted({*counts})))})"
    return "no measured degree suits the nodes"


def _equal(costs: Costs) -> dict[tuple[int, int], Strategy]:
    layers = costs.outline.layers
    nodes = Counter(device.node for device in costs.cluster.devices)
    strategies = {}
    for tp in common_degrees(costs):
        if any(count % tp for count in nodes.values()):
            continue
        for stages in range(1, min(layers, costs.ranks // tp) + 1):
            if costs.ranks % (tp * stages) == 0:
                text = f"{costs.ranks // (tp * stages)}*<tp{tp},pp{stages}>"
                strategies[tp, stages] = Strategy.parse(text, layers)
    return strategies


def with_causes(costs: Costs, workload: Workload, plan: Plan, seconds: float) -> Plan:
    """Explain within `seconds` why the rivals shown by `Plan.explain` are slower."""
    until = time.monotonic() + seconds
    compared = _Compared(MiniBatchPrices(costs, workload.batches), plan)
    rivals = list(plan.rivals)
    for i, rival in enumerate(rivals[:SHOWN]):
        if time.monotonic() > until:
            break
        if math.isfinite(rival.seconds):
            why, took = compared.verdict(rival.strategy, rival.settled)
            rivals[i] = replace(rival, why=why, seconds=took)
    nearest = sorted(rivals[:SHOWN], key=lambda rival: rival.seconds)
    return replace(plan, rivals=(*nearest, *rivals[SHOWN:]))


@dataclass(frozen=True, eq=False)
class _Compared:
    varied: MiniBatchPrices
    plan: Plan

    @cached_property
    def _own(self) -> dict[str, float]:
        return device_time(self.varied.costs, self.plan.strategy, self.plan.home, self.plan.assignment)

    def verdict(self, rival: Strategy, settled: PricedPlan | None = None, equally: bool = False) -> tuple[str, float]:
        if rival == self.plan.strategy and not equally:
            return "is the plan", self.plan.seconds
        try:
            if equally:
                found = self.varied.settle_equally(rival)
            else:
                found = settled if settled is not None and settled.simulated else self.varied.settle(rival, "usual")
        except Unsupported as error:
            return f"cannot run: {error}", math.inf
        if isinstance(found, Shortage):
            return f"does not fit: {found}", math.inf
        if not math.isfinite(found.seconds):
            return "does not fit the longest sequence", math.inf
        more = found.seconds / self.plan.seconds - 1
        if more < -0.005:
            return f"takes {-more:.0%} less time, but the search did not simulate it", found.seconds
        if more < 0.005:
            return "takes the same time", found.seconds
        costs = self.varied.costs
        spent = device_time(costs, rival, found.home, found.assignments[0])
        unused = 1 - len({*rival.devices, *self.plan.strategy.devices}) / costs.ranks
        return f"takes {more:.0%} longer (mostly {main_cause(rival, spent, self._own, unused)})", found.seconds


def devices_line(costs: Costs, names: Sequence[str], links: str) -> str:
    nodes = len({device.node for device in costs.cluster.devices})
    parts = []
    for name, count in Counter(names).items():
        device = costs.cluster.devices[names.index(name)]
        parts.append(f"{count} x {name} ({device.flops_per_s / 1e9:.3g} GFLOP/s, {device.memory_bytes / 1e9:.3g} GB)")
    return f"devices: {', '.join(parts)} on {nodes} node{'s' * (nodes > 1)}{links}"

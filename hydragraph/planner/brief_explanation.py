"""A plan in a few lines, and why the usual strategies and rivals lose."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.device_time import device_time, main_cause
from hydragraph.planner.explanation import SHOWN, pipeline_text
from hydragraph.planner.plan import Plan
from hydragraph.planner.price_candidate import Shortage
from hydragraph.planner.price_mini_batches import Varied
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload


def brief_explanation(costs: Costs, workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Return the plan, its costs, and why each usual strategy loses, in at most five lines."""
    tightest = max(range(costs.ranks), key=lambda rank: plan.memory[rank] / plan.limits[rank])
    lines = [
        f"plan: {_in_words(costs, plan)}",
        f"expected: {plan.seconds:.3g} s per step; tightest memory: rank {tightest} with "
        f"{plan.memory[tightest] / 1e9:.3g} of {plan.limits[tightest] / 1e9:.3g} GB",
    ]
    varied = Varied(costs, workload.batches)
    usual = _usual(varied, plan.strategy)
    return (
        *lines,
        *(f"{name}: {strategy.name} {_verdict(varied, plan, strategy)[0]}" for name, strategy in usual.items()),
    )


def _in_words(costs: Costs, plan: Plan) -> str:
    counts = Counter(pipeline_text(costs, pipeline) for pipeline in plan.strategy.pipelines)
    pipelines = " + ".join(f"{count} x [{text}]" if count > 1 else f"[{text}]" for text, count in counts.items())
    more = len(plan.strategies) - 1
    also = f", or {more} other{'s' * (more > 1)} for mini-batches that it suits better" if more else ""
    idle = sorted(set(range(costs.ranks)) - set(plan.strategy.devices))
    if not idle:
        return f"{plan.strategy.name}: {pipelines}{also}"
    shown = ", ".join(map(str, idle[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
    small = all(costs.memory_of(rank) < min(plan.memory[r] for r in plan.strategy.devices) for rank in idle)
    why = "too little memory for its part" if small else "a step takes longer with them"
    return f"{plan.strategy.name}: {pipelines}{also}; idle: {shown} ({why})"


def _usual(varied: Varied, chosen: Strategy) -> Mapping[str, Strategy]:
    costs = varied.costs
    equal = _equal(costs)
    strategies = {}
    if (1, 1) in equal:
        strategies["plain data parallelism"] = equal[1, 1]
    widest = max((tp for tp, stages in equal if stages == 1), default=1)
    if widest > 1:
        strategies["plain tensor parallelism"] = equal[widest, 1]
    seconds = {}
    for strategy in equal.values():
        if strategy not in strategies.values() and strategy != chosen:
            try:
                seconds[strategy] = varied.seconds(strategy)
            except Unsupported:
                continue
    if seconds:
        strategies["best other equal pipelines"] = min(seconds, key=lambda strategy: seconds[strategy])
    return strategies


def _equal(costs: Costs) -> dict[tuple[int, int], Strategy]:
    layers = costs.outline.layers
    nodes = Counter(device.node for device in costs.cluster.devices)
    kinds = [costs.profile.of(name).pieces for name in costs.cluster.types]
    degrees = set.intersection(*({kind.tp for kind in pieces} for pieces in kinds))
    strategies = {}
    for tp in sorted(degrees):
        if not costs.sizes.allows(tp) or any(count % tp for count in nodes.values()):
            continue
        for stages in range(1, min(layers, costs.ranks // tp) + 1):
            if costs.ranks % (tp * stages) == 0:
                text = f"{costs.ranks // (tp * stages)}*<tp{tp},pp{stages}>"
                strategies[tp, stages] = Strategy.parse(text, layers)
    return strategies


def with_causes(costs: Costs, workload: Workload, plan: Plan, seconds: float) -> Plan:
    """Simulate the rivals that an explanation shows within `seconds`, and say why they are slower."""
    until = time.monotonic() + seconds
    varied = Varied(costs, workload.batches)
    rivals = list(plan.rivals)
    for i, rival in enumerate(rivals[:SHOWN]):
        if time.monotonic() > until:
            break
        if math.isfinite(rival.seconds):
            why, took = _verdict(varied, plan, rival.strategy)
            rivals[i] = replace(rival, why=why, seconds=took)
    return replace(plan, rivals=tuple(rivals))


def _verdict(varied: Varied, plan: Plan, rival: Strategy) -> tuple[str, float]:
    if rival == plan.strategy:
        return "is the plan", plan.seconds
    try:
        settled = varied.settle(rival, "usual")
    except Unsupported as error:
        return f"cannot run: {error}", math.inf
    if isinstance(settled, Shortage):
        return f"does not fit: {settled} (memory)", math.inf
    if not math.isfinite(settled.seconds):
        return "cannot take the longest sequence (memory)", math.inf
    more = settled.seconds / plan.seconds - 1
    if more < -0.005:
        return f"takes {-more:.0%} less time, but was not simulated during the search", settled.seconds
    if more < 0.005:
        return "takes as long", settled.seconds
    costs = varied.costs
    own = device_time(costs, plan.strategy, plan.home, plan.assignment)
    cause = main_cause(device_time(costs, rival, settled.home, settled.assignments[0]), own)
    return f"takes {more:.0%} longer (mostly {cause})", settled.seconds


def devices_line(costs: Costs, names: Sequence[str], links: str) -> str:
    """Return a line on the devices."""
    nodes = len({device.node for device in costs.cluster.devices})
    parts = []
    for name, count in Counter(names).items():
        device = costs.cluster.devices[names.index(name)]
        parts.append(f"{count} x {name} ({device.flops_per_s / 1e9:.3g} GFLOP/s, {device.memory_bytes / 1e9:.3g} GB)")
    return f"devices: {', '.join(parts)} on {nodes} node{'s' * (nodes > 1)}{links}"

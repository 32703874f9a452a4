"""A plan in a few lines: what runs, how long and how full it is, and why the usual strategies lose.

The usual strategies are plain data parallelism, plain tensor parallelism, and the best of all equal pipelines. Each is
priced and simulated like the plan. Its cause is the kind of device time that it spends more of than the plan:

    memory       it does not fit
    computation  products are smaller, or their sums travel, at a higher tensor-parallel degree
    traffic      pulls, pushes and messages that are not hidden, and the update
    bubble       waiting for other stages; without stages: imbalance, waiting for other ranks
    idle         devices without work
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from hydragraph.cost.accounts import Kind, predicted_accounts
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.explanation import pipeline_text
from hydragraph.planner.plan import Plan
from hydragraph.planner.price_candidate import Shortage
from hydragraph.planner.price_mini_batches import Varied
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

_COMPUTATION = (Kind.FORWARD, Kind.BACKWARD)
_WAITING = (Kind.LATE, Kind.OTHER)


def brief_explanation(costs: Costs, workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Return at most five lines on a plan: the plan, its seconds and memory, and why each usual strategy loses.

    Args:
        costs: that the plan was made with.
        workload: that it was made for.
        plan: the plan.
    """
    tightest = max(range(costs.ranks), key=lambda rank: plan.memory[rank] / plan.limits[rank])
    lines = [
        f"plan: {_in_words(costs, plan)}",
        f"expected: {plan.seconds:.3g} s per step; tightest memory: rank {tightest} with "
        f"{plan.memory[tightest] / 1e9:.3g} of {plan.limits[tightest] / 1e9:.3g} GB",
    ]
    varied = Varied(costs, workload.batches)
    return (*lines, *(f"{name}: {_verdict(varied, plan, s)}" for name, s in _usual(varied, plan.strategy).items()))


def _in_words(costs: Costs, plan: Plan) -> str:
    """Describe the pipelines, further candidates and idle devices of a plan."""
    counts = Counter(pipeline_text(costs, pipeline) for pipeline in plan.strategy.pipelines)
    pipelines = " + ".join(f"{count} x [{text}]" if count > 1 else f"[{text}]" for text, count in counts.items())
    more = len(plan.strategies) - 1
    also = f", or {more} other{'s' * (more > 1)} where a mini-batch suits it better" if more else ""
    idle = sorted(set(range(costs.ranks)) - set(plan.strategy.devices))
    if not idle:
        return f"{plan.strategy.name}: {pipelines}{also}"
    shown = ", ".join(map(str, idle[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
    small = all(costs.memory_of(rank) < min(plan.memory[r] for r in plan.strategy.devices) for rank in idle)
    why = "too little memory for its part" if small else "a step takes longer with them"
    return f"{plan.strategy.name}: {pipelines}{also}; idle: {shown} ({why})"


def _usual(varied: Varied, chosen: Strategy) -> Mapping[str, Strategy]:
    """Return plain data parallelism, plain tensor parallelism, and the best other strategy of equal pipelines."""
    costs = varied.costs
    equal = _equal(costs)
    found = {}
    if (1, 1) in equal:
        found["plain data parallelism"] = equal[1, 1]
    widest = max((tp for tp, stages in equal if stages == 1), default=1)
    if widest > 1:
        found["plain tensor parallelism"] = equal[widest, 1]
    seconds = {}
    for strategy in equal.values():
        if strategy not in found.values() and strategy != chosen:
            try:
                seconds[strategy] = varied.seconds(strategy)
            except Unsupported:
                continue
    if seconds:
        found["best other equal pipelines"] = min(seconds, key=lambda strategy: seconds[strategy])
    return found


def _equal(costs: Costs) -> dict[tuple[int, int], Strategy]:
    """Return the strategies of equal pipelines on all devices, by degree and number of stages."""
    layers = costs.outline.layers
    nodes = Counter(device.node for device in costs.cluster.devices)
    kinds = [costs.profile.of(name).pieces for name in costs.cluster.types]
    degrees = set.intersection(*({kind.tp for kind in pieces} for pieces in kinds))
    found = {}
    for tp in sorted(degrees):
        if not costs.sizes.allows(tp) or any(count % tp for count in nodes.values()):
            continue
        for stages in range(1, min(layers, costs.ranks // tp) + 1):
            if costs.ranks % (tp * stages) == 0:
                text = f"{costs.ranks // (tp * stages)}*<tp{tp},pp{stages}>"
                found[tp, stages] = Strategy.parse(text, layers)
    return found


def _verdict(varied: Varied, plan: Plan, rival: Strategy) -> str:
    """Return how much longer a strategy takes than the plan, and the cause."""
    name = rival.name
    if rival == plan.strategy:
        return f"{name} is the plan"
    try:
        settled = varied.settle(rival, "usual")
    except Unsupported as error:
        return f"{name} cannot run: {error}"
    if isinstance(settled, Shortage):
        return f"{name} does not fit: {settled} (memory)"
    if not math.isfinite(settled.seconds):
        return f"{name} cannot take the longest sequence (memory)"
    more = settled.seconds / plan.seconds - 1
    if more < 0.005:
        return f"{name} takes as long"
    costs = varied.costs
    own = _spent(costs, plan.strategy, plan.home, plan.assignment)
    other = _spent(costs, rival, settled.home, settled.assignments[0])
    cause = max(other, key=lambda kind: other[kind] - own.get(kind, 0.0))
    return f"{name} takes {more:.0%} longer (mostly {cause})"


def _spent(costs: Costs, strategy: Strategy, home: Home, assignment: Assignment) -> dict[str, float]:
    """Return the seconds of an average device by what they are spent on."""
    timeline = costs.changed(home=home).simulate(strategy, assignment)
    accounts = predicted_accounts(timeline)
    staged = any(len(pipeline.stages) > 1 for pipeline in strategy.pipelines)
    waiting = "bubble" if staged else "imbalance"
    spent = {"computation": 0.0, "traffic": 0.0, waiting: 0.0, "idle devices": 0.0}
    for rank, account in enumerate(accounts):
        if rank not in strategy.devices:
            spent["idle devices"] += timeline.seconds
            continue
        for kind, seconds in account.seconds.items():
            what = "computation" if kind in _COMPUTATION else waiting if kind in _WAITING else "traffic"
            spent[what] += seconds
    return {what: seconds / len(accounts) for what, seconds in spent.items()}


def devices_line(costs: Costs, names: Sequence[str], links: str) -> str:
    """Return a line on the devices: how many of which type on how many nodes, with their speed and memory.

    Args:
        costs: of the cluster.
        names: the type of each rank.
        links: text on the measured links.
    """
    nodes = len({device.node for device in costs.cluster.devices})
    parts = []
    for name, count in Counter(names).items():
        device = costs.cluster.devices[names.index(name)]
        parts.append(f"{count} x {name} ({device.flops_per_s / 1e9:.3g} GFLOP/s, {device.memory_bytes / 1e9:.3g} GB)")
    return f"devices: {', '.join(parts)} on {nodes} node{'s' * (nodes > 1)}{links}"

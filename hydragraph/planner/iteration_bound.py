"""Lower bound on the iteration time of any plan.

A group of k ranks that takes t seconds for one block of one sequence spends k t device-seconds. The bound uses the
fewest device-seconds of any group of a type. In time T, a type's devices with rates (slowdowns) x_d provide T sum 1 /
x_d device-seconds. A linear program finds the least T in which the types can compute all blocks of all sequences.

The bound is at least the longest sequence's forward and input-gradient backward (zb-h1), each block on its fastest
group. With one type of device and one kind of block, it is Malleus's T_opt.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from hydragraph.cost.costs import Costs
from hydragraph.cost.instruction_work import SHARES
from hydragraph.ir.schedules.schedule import Work
from hydragraph.planner.generators.device_groups import nodes_of
from hydragraph.planner.generators.group_prices import DeviceSite
from hydragraph.spec.health import Health
from hydragraph.spec.pipeline import Stage


def bound(costs: Costs, batches: Sequence[Sequence[int]]) -> float:
    """Return the bound, averaged over mini-batches; infinite if no group of devices was measured."""
    bounds = [_bound(costs, Counter(batch)) for batch in dict.fromkeys(tuple(sorted(b)) for b in batches)]
    weights = Counter(tuple(sorted(b)) for b in batches)
    return sum(s * n for s, n in zip(bounds, weights.values(), strict=True)) / len(batches)


def _bound(costs: Costs, lengths: Counter[int]) -> float:
    # Only for planning
    from scipy.linalg import block_diag
    from scipy.optimize import linprog

    healthy = costs.changed(health=Health())
    nodes = nodes_of(costs)
    # Healthy devices per type; one with slowdown x counts as 1 / x.
    capacity: dict[DeviceSite, float] = defaultdict(float)
    for node in nodes:
        capacity[node.site] += sum(1 / rate for rate in node.rates)
    sites = list(capacity)
    example = {site: max((node.devices for node in nodes if node.site == site), key=len) for site in sites}
    blocks = Counter(costs.profile.blocks)
    templates = list(blocks)
    # Per type and kind of block: device-seconds of all sequences, and the longest sequence's
    # seconds alone.
    spent = np.full((len(sites), len(templates)), math.inf)
    alone = np.full((len(sites), len(templates)), math.inf)
    longest = max(lengths)
    every_length = tuple(lengths.elements())
    for s, site in enumerate(sites):
        for kind in costs.profile.of(site.type).pieces:
            if kind.tp > len(example[site]) or not costs.sizes.allows(kind.tp):
                continue
            stage = Stage.of(example[site][: kind.tp], 1, kind)
            for t, template in enumerate(templates):
                at = costs.profile.blocks.index(template)
                cost = healthy.stage(stage, (at, at + 1))
                # All sequences in one micro-batch, without aux.
                spent[s, t] = min(spent[s, t], kind.tp * sum(cost.apart(every_length)[1:]))
                forward, backward = cost.apart([longest])[1:]
                alone[s, t] = min(alone[s, t], forward + SHARES[Work.INPUT_GRADIENT] * backward)
    able = np.all(np.isfinite(spent), axis=1)
    if not able.any():
        return math.inf
    counts = np.array([blocks[template] for template in templates])
    # Variables: fractions of templates on types of devices [types * templates], then T.
    speeds = np.array(list(capacity.values()))[able]
    objective = np.append(np.zeros(len(speeds) * len(templates)), 1.0)
    # Equalities: a template's fractions add up to 1. Inequalities: a type's device-seconds are at
    # most its speed times T.
    every = np.hstack([*[np.eye(len(templates))] * len(speeds), np.zeros((len(templates), 1))])
    limits = np.hstack([block_diag(*(counts * spent[able])), -speeds[:, None]])
    solved = linprog(objective, limits, np.zeros(len(speeds)), every, np.ones(len(templates)), method="highs")
    through = sum(count * alone[:, t].min() for t, count in enumerate(counts))
    return max(float(solved.fun), float(through))

"""The best of all plans of small clusters, by trying every possible pipeline; and comparison of plans with it.

    python -m tests.planner.exhaustive                        # all clusters up to 6 devices, 6 layers; hours
    python -m tests.planner.exhaustive --devices 4 --layers 4
    python -m tests.planner.exhaustive --drawn 1000           # drawn clusters: every promise of a plan
    python -m tests.planner.exhaustive --drawn 1000 --devices 64   # of up to 64 devices

Equal devices (of one type, node and rate) are interchangeable, so a pipeline is a sequence of groups of kinds with
layers. E(u, m), the end of the quickest pipeline that uses the devices u for m micro-batches, is looked up for every u
and m; the best plan of the devices d for M micro-batches is then

    best(d, M) = min over u <= d, m <= M of max(E(u, m), best(d - u, M - m)),    best(d, 0) = 0
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.stage_costs import stages_end
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from tests.cost import priced
from tests.planner.promises import LENGTH, METHODS, keeps_every_promise, situations

DEGREES = (1, 2, 4)
RATES: tuple[dict[int, float], ...] = ({}, {0: 2.57}, {0: 12.53}, {0: 1.5, 1: 5.42})
SEQUENCES = 8

Used = tuple[int, ...]  # devices of each kind


def best_seconds(costs: Costs, sequences: int, length: int = LENGTH) -> float:
    """Return when the best of all plans ends whose micro-batches are single sequences."""
    ranks: dict[tuple[int, str, float], list[int]] = {}
    for rank, device in enumerate(costs.cluster.devices):
        if math.isfinite(costs.health.rate(rank)):
            ranks.setdefault((device.node, device.type, costs.rate(rank)), []).append(rank)
    kinds = list(ranks)
    whole = tuple(len(ranks[kind]) for kind in kinds)
    ends: dict[Used, list[float]] = {}
    for used, pipeline in _pipelines(costs, kinds, ranks, whole):
        found = ends.setdefault(used, [0.0] + [math.inf] * sequences)
        parts = costs.stages(pipeline)
        for count in range(1, sequences + 1):
            found[count] = min(found[count], stages_end(parts, [(length,)] * count, "1f1b"))

    @cache
    def best(left: Used, micro_batches: int) -> float:
        if not micro_batches:
            return 0.0
        found = math.inf
        for used, end in ends.items():
            if all(a <= b for a, b in zip(used, left, strict=True)):
                rest = tuple(b - a for a, b in zip(used, left, strict=True))
                for count in range(1, micro_batches + 1):
                    if end[count] < found:
                        found = min(found, max(end[count], best(rest, micro_batches - count)))
        return found

    return best(whole, sequences)


def _pipelines(
    costs: Costs,
    kinds: Sequence[tuple[int, str, float]],
    ranks: dict[tuple[int, str, float], list[int]],
    whole: Used,
) -> Iterator[tuple[Used, hg.Pipeline]]:
    """Yield every pipeline up to exchanges of equal devices, with the devices of each kind that it uses."""
    groups = [
        group
        for degree in DEGREES
        if not any(heads % degree for heads in costs.sizes.heads)
        for group in itertools.combinations_with_replacement(range(len(kinds)), degree)
        if len({kinds[k][0] for k in group}) == 1 and _within(group, whole)
    ]
    layers = costs.outline.layers

    def extend(order: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if order:
            yield order
        if len(order) < layers:
            for group in groups:
                if _within([k for each in (*order, group) for k in each], whole):
                    yield from extend((*order, group))

    for order in extend(()):
        used = Counter(k for group in order for k in group)
        waiting = {k: iter(ranks[kind]) for k, kind in enumerate(kinds)}
        devices = [tuple(next(waiting[k]) for k in group) for group in order]
        for cuts in itertools.combinations(range(1, layers), len(order) - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, layers))]
            stages = tuple(hg.Stage(group, n) for group, n in zip(devices, counts, strict=True))
            yield tuple(used[k] for k in range(len(kinds))), hg.Pipeline(stages)


def _within(members: Sequence[int], whole: Used) -> bool:
    return all(n <= whole[k] for k, n in Counter(members).items())


def costs_of(fast: int, slow: int, layers: int, rates: dict[int, float]) -> Costs:
    """Return costs of a node of so many fast devices and one of so many slow ones."""
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}
    counts = {"fast": fast, "slow": slow}
    nodes = tuple(Node(name, n, priced.FAST, priced.SLOW, cards=n) for name, n in counts.items() if n)
    cluster = Cluster.of({node.type: types[node.type] for node in nodes}, nodes)
    return priced.costs(layers, cluster, hg.Health({rank: x for rank, x in rates.items() if rank < fast + slow}))


def above(costs: Costs, sequences: int = SEQUENCES) -> float:
    """Return how far above the best of all plans `hg.plan`'s pipelines end: 0.02 is 2 %, below 0 it found better."""
    plan = hg.plan(costs, hg.Workload(sequences=sequences, length=LENGTH))
    return costs.pipelines_end(plan.strategy, plan.assignment) / best_seconds(costs, sequences) - 1


def every(devices: int, layers: int) -> Iterator[tuple[int, int, int, dict[int, float]]]:
    """Yield fast and slow devices, layers and rates of all clusters, small ones first."""
    for total in range(1, devices + 1):
        for fast in range(total + 1):
            for depth in range(1, layers + 1):
                for rates in RATES:
                    if len(rates) < total or not rates:
                        yield fast, total - fast, depth, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="at most (6); or of all drawn clusters (a few)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--skip", type=int, default=1, help="look at every so many-th cluster only")
    parser.add_argument(
        "--drawn", type=int, help="look at so many drawn clusters instead: every promise of their plans"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    chosen = parser.parse_args()
    if chosen.drawn is not None:
        drawn(chosen.drawn, chosen.devices)
        return
    until = time.monotonic() + 60 * chosen.minutes
    found: list[tuple[float, tuple[int, int, int, dict[int, float]]]] = []
    for each in itertools.islice(every(chosen.devices or 6, chosen.layers), 0, None, chosen.skip):
        if time.monotonic() > until:
            break
        found.append((above(costs_of(*each)), each))
        if len(found) % 20 == 0:
            print(_told(found), file=sys.stderr, flush=True)
    print(_told(found))


def _told(found: Sequence[tuple[float, object]]) -> str:
    worst, where = max(found, key=lambda each: each[0])
    near = sum(each <= 0.02 for each, _ in found)
    return (
        f"{len(found)} clusters: {near} within 2 % of the best of all plans; the worst is {worst:.1%} above it, with "
        f"(fast, slow, layers, rates) {where}"
    )


def drawn(count: int, devices: int | None) -> None:
    """Look at every promise of the plans of so many drawn clusters; the first one that is broken is raised, shrunk."""
    asked = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    looked_at = given(situations(devices), st.sampled_from(METHODS))

    def promised(situation: tuple[Costs, hg.Workload], method: str) -> None:
        keeps_every_promise(situation, method, alone=devices is not None)

    asked(looked_at(promised))()
    print(f"{count} drawn clusters{f' of {devices} devices' if devices else ''}: every plan keeps every promise")


if __name__ == "__main__":
    main()

"""Errors if no plan fits, with the memory, sequence length or number of devices that would suffice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.errors import Unsupported
from hydragraph.planner.bisection import bisect
from hydragraph.planner.generators.group_prices import SAFETY, state_bytes
from hydragraph.planner.generators.malleus_autohet import fits
from hydragraph.planner.price_candidate import Shortage
from hydragraph.planner.streamed_data_parallelism import streaming_fits
from hydragraph.spec.home import Home
from hydragraph.spec.training_workload import Workload

# Maximum factors for memory and devices.
MOST = 64
MANY = 8
NEARLY = 0.04  # relative precision


def check_labels(costs: Costs, workload: Workload) -> None:
    running = _running(costs)
    least = batch_bytes(0, max(map(sum, workload.batches)))
    small = [rank for rank in running if costs.memory_of(rank) < least]
    if small:
        listed = ", ".join(map(str, small))
        lost = ", ".join(f"{rank}: inf" for rank in small)
        without = f"run without ranks {listed} (health rates {{{lost}}}), or " if len(small) < len(running) else ""
        raise Unsupported(
            f"nothing fits: every rank holds the labels of all sequences ({least / 1e9:.3g} GB), which exceed the "
            f"memory of rank{'s' * (len(small) > 1)} {listed}",
            where=f"plan for {workload} on {costs.ranks} device{'s' * (costs.ranks > 1)}",
            remedy=f"{without}give smaller mini-batches",
        )


def nothing_fits(
    costs: Costs, workload: Workload, short: Sequence[Shortage], safety: float = SAFETY, streaming: bool = False
) -> Unsupported:
    state = costs.home.copies * state_bytes(costs)
    room = sum(costs.memory_of(rank) for rank in _running(costs))
    if short and state < room:
        nearest = min(short, key=lambda each: each.bytes)
        why = f"in the closest strategy, {nearest.strategy.name}, {nearest}"
        first = f"give that rank {nearest.bytes / 1e9:.3g} GB more, "
    else:
        why = (
            f"no pipeline of these devices can hold the model and {workload.longest:,} tokens: the state alone takes "
            f"{state / 1e9:.3g} GB of the devices' {room / 1e9:.3g} GB, and each stage adds weights, "
            "gradients and activations"
        )
        first = ""
    wishes = _wishes(costs, workload, safety, streaming)
    changes = f"the model may fit with {' or with '.join(wishes)}; " if wishes else ""
    return Unsupported(
        f"nothing fits: {why}",
        where=f"plan for {workload} on {costs.ranks} device{'s' * (costs.ranks > 1)}",
        remedy=f"{changes}{first}allow recomputation and higher tensor-parallel degrees (a measured profile must "
        "cover both: hydragraph profile --recompute), shorten the sequences, or add devices, which share the state",
    )


def _running(costs: Costs) -> list[int]:
    return [rank for rank in range(costs.ranks) if math.isfinite(costs.health.rate(rank))]


def _wishes(costs: Costs, workload: Workload, safety: float, streaming: bool) -> list[str]:
    longest = workload.longest

    def able(costs: Costs, length: int = longest, times: float = 1.0) -> bool:
        whole = fits(costs, workload.typical.sequences, length, times * safety)
        return whole or (streaming and streaming_fits(costs, length, times))

    wishes = []
    memory = _least(lambda times: able(costs, times=times), MOST)
    if 1 < memory < math.inf:
        wishes.append(f"{memory:.3g} times the memory in each device")
    shorter = _least(lambda times: able(costs, max(1, int(longest / times))), longest)
    if 1 < shorter < math.inf:
        wishes.append(f"sequences of at most {max(1, int(longest / shorter)):,} tokens")
    for times in (2, 4, MANY):
        if able(_several(costs, times)):
            wishes.append(f"{times} times as many such devices")
            break
    return wishes


def _least(able: Callable[[float], bool], most: float) -> float:
    high = 1.0
    while not able(high):
        if high >= most:
            return math.inf
        high = min(2 * high, most)
    return 1.0 if high == 1 else bisect(able, high / 2, high, NEARLY)[1]


def _several(costs: Costs, times: int) -> Costs:
    cluster = costs.cluster
    count = 1 + max(device.node for device in cluster.devices)
    devices = tuple(replace(d, node=d.node + i * count) for i in range(times) for d in cluster.devices)
    return costs.changed(
        cluster=replace(cluster, devices=devices, nodes=times * cluster.nodes), home=Home(copies=costs.home.copies)
    )

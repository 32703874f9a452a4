"""Candidates for equal sequences: degrees, groups, numbers of pipelines and micro-batch sizes, the best improved."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.uneven.groups import Group, forms_of, groupings, nodes_of
from hydragraph.planner.uneven.pipelines import Bench, Partition, numbers
from hydragraph.planner.uneven.prices import SAFETY, Prices, state_bytes
from hydragraph.planner.uneven.settle import Candidate

# Of the partitions that were priced, how many are improved by exchanges.
IMPROVED = 6
# Partitions kept, these among them.
KEPT = 12
# What takes longer than this many times the best is not kept.
WITHIN = 1.25
# Groups of more than so many times the rate of the healthiest may be better left idle.
SLOW = 1.5
# Micro-batches of more sequences than use a device well hide more of pull and push behind the first forward and the
# last backward: up to so many are tried, as long as that gains.
LARGEST = 16


@dataclass(frozen=True)
class Way:
    """A way of searching.

    Attributes:
        name: for explanations.
        split: whether nodes with stragglers are split into groups of different sizes.
        symmetric: whether all types of devices have one tensor-parallel degree.
    """

    name: str
    split: bool
    symmetric: bool


MIXED = Way("mixed", split=False, symmetric=False)
STRAGGLER = Way("straggler", split=True, symmetric=True)
TOGETHER = Way("auto", split=True, symmetric=False)


def search(
    costs: Costs,
    sequences: int,
    length: int,
    way: Way,
    *,
    reach: int = 0,
    ranks: Sequence[int] | None = None,
    until: float | None = None,
) -> list[Candidate]:
    """Return candidates for an iteration of equal sequences, the most promising first.

    Args:
        reach: tokens of the longest micro-batch that every pipeline must be able to hold; default: its own.
        ranks: to use; default: all.
        until: by this time (of `time.monotonic`) what was found so far is returned.

    Raises:
        Unsupported: no device is left.
    """
    nodes = nodes_of(costs, ranks)
    if not nodes:
        raise Unsupported("all devices are lost", where="plan", remedy="give a health in which some rank still runs")
    reserve = _reserve(costs)
    best = math.inf
    # Of partitions that are much alike the best is kept: what is settled later should differ.
    found: dict[object, Candidate] = {}
    sizes, useful = _sizes(costs, sequences, length)
    for together in sizes:
        before = best
        lengths = [length] * together
        prices = Prices(costs, lengths, reach)
        micro_batches = -(-sequences // together)
        for groups in groupings(costs, prices, nodes, split=way.split, symmetric=way.symmetric):
            bench = _bench(costs, prices, groups, micro_batches, reserve)
            counts = {bench.forms.index(form): n for form, n in forms_of(groups).items()}
            # All groups busy all the time is a bound on what this grouping can give.
            if micro_batches * bench.layers / sum(bench.speed[i] * n for i, n in counts.items()) > WITHIN * best:
                continue
            for partition in _partitions(bench, counts):
                if until is not None and time.monotonic() > until and found:
                    break
                if partition.seconds > WITHIN * best or not math.isfinite(partition.seconds):
                    continue
                best = min(best, partition.seconds)
                candidate = Candidate(bench, partition, groups, together, way.name)
                shape = candidate.shape
                if shape not in found or partition.seconds < found[shape].seconds:
                    found[shape] = candidate
        if together > max(useful, 2) and best >= before:
            break
    first = sorted(found.values(), key=lambda candidate: candidate.seconds)[:KEPT]
    better = [_improved(candidate) for candidate in first[:IMPROVED] if until is None or time.monotonic() < until]
    return sorted([*better, *first], key=lambda candidate: candidate.seconds)


def _partitions(bench: Bench, counts: dict[int, int]) -> Iterator[Partition]:
    """Yield partitions of all groups, and of those that are not slow, the slow ones idle."""
    healthy = min(form.rate for form in bench.forms)
    slow = {i for i in counts if bench.forms[i].rate > SLOW * healthy}
    for left_out in [set[int](), slow] if slow and len(slow) < len(counts) else [set[int]()]:
        used = {i: n for i, n in counts.items() if i not in left_out}
        idle = tuple(i for i in sorted(left_out) for _ in range(counts[i]))
        for number in numbers(sum(used.values()), bench.micro_batches, bench.layers):
            for start in bench.starts(used, number):
                yield Partition(tuple(sorted(start.items())), idle, bench.price(start))


def _improved(candidate: Candidate) -> Candidate:
    partition = candidate.bench.improved(Counter(dict(candidate.partition.pipelines)), candidate.partition.idle)
    return Candidate(candidate.bench, partition, candidate.groups, candidate.together, candidate.origin)


def _bench(
    costs: Costs, prices: Prices, groups: Sequence[Group], micro_batches: int, reserve: dict[int, float]
) -> Bench:
    forms = list(forms_of(groups))
    free = {}
    for group in groups:
        # The devices of a group may differ in what is left to them; the least counts.
        free[group.form] = min(SAFETY * costs.memory_of(rank) - reserve[rank] for rank in group.devices)
    return Bench(prices, forms, [free[form] for form in forms], micro_batches, alone=costs.ranks == 1)


def _reserve(costs: Costs) -> dict[int, float]:
    """Return bytes of the state on every rank, if it were shared in proportion to memory."""
    usable = {r: costs.memory_of(r) for r in range(costs.ranks) if math.isfinite(costs.health.rate(r))}
    total = costs.home.copies * state_bytes(costs)
    return {rank: total * memory / sum(usable.values()) for rank, memory in usable.items()}


def _sizes(costs: Costs, sequences: int, length: int) -> tuple[list[int], int]:
    """Return how many sequences a micro-batch may have, and below which number each is tried whatever it gains."""
    useful = max(max(profile.util.values(), default=1) for profile in costs.profiles)
    sizes = [1]
    while 2 * sizes[-1] <= min(sequences, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes, 2 * useful // length

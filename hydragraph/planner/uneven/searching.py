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
from hydragraph.planner.uneven.power import Kind, NothingHolds, most_power_by_scip
from hydragraph.planner.uneven.prices import SAFETY, Prices, reserves
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
        published: whether groups become pipelines by AutoHet's equation 3 as it stands, solved by SCIP, and stay so.
    """

    name: str
    split: bool
    symmetric: bool
    published: bool = False


MIXED = Way("mixed", split=False, symmetric=False)
STRAGGLER = Way("straggler", split=True, symmetric=True)
PUBLISHED = Way("scip", split=False, symmetric=True, published=True)
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
    reserve = reserves(costs)
    best = math.inf
    # Of partitions that are much alike the best is kept: what is settled later should differ.
    found: dict[object, Candidate] = {}
    sizes, useful = sizes_of(costs, sequences, length)
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
            for partition in _published(bench, counts) if way.published else _partitions(bench, counts):
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
    gaining = [] if way.published else first[:IMPROVED]
    better = [_improved(candidate) for candidate in gaining if until is None or time.monotonic() < until]
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


def _published(bench: Bench, counts: dict[int, int]) -> Iterator[Partition]:
    """Yield the partition with the most effective computing power, as AutoHet's equation 3 has it; none may fit."""
    forms = sorted(counts)
    kinds = [Kind(bench.speed[i], bench.memory[i], counts[i]) for i in forms]
    if min(kind.memory for kind in kinds) <= 0:
        return
    try:
        found = most_power_by_scip(kinds, bench.micro_batches, bench.least_bytes)
    except NothingHolds:
        return
    pipelines = Counter(
        tuple(sorted(form for form, n in zip(forms, group, strict=True) for _ in range(n))) for group in found.groups
    )
    yield Partition(tuple(sorted(pipelines.items())), (), bench.price(pipelines))


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


def sizes_of(costs: Costs, sequences: int, length: int) -> tuple[list[int], int]:
    """Return how many sequences a micro-batch may have, and below which number each is tried whatever it gains."""
    useful = max(max(profile.util.values(), default=1) for profile in costs.profiles)
    sizes = [1]
    while 2 * sizes[-1] <= min(sequences, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes, 2 * useful // length

"""Search for plans of equal sequences, over degrees, groups, numbers of pipelines and micro-batch sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.deadline import is_late
from hydragraph.planner.exact.autohet_grouping import EntityKind, NothingHolds, most_power_by_scip
from hydragraph.planner.generators.device_groups import Group, forms_of, groupings, nodes_of
from hydragraph.planner.generators.group_prices import SAFETY, DeviceSite, Market, Prices, free_bytes
from hydragraph.planner.generators.pipelines_of_groups import Bench, Partition, numbers
from hydragraph.planner.price_candidate import SearchCandidate

# Maximum partitions to improve by exchanges, and to keep.
IMPROVED = 6
KEPT = 12
# Partitions into pipelines are kept if they take at most this multiple of the best time.
WITHIN = 1.25
# Groups slower than the healthiest by this factor may stay idle.
SLOW = 1.5
# Groups of the weakest kinds of devices may stay idle, up to this fraction of all power.
WEAK = 0.3
# Sequences per micro-batch to try.
LARGEST = 16


@dataclass(frozen=True)
class Way:
    """A search method.

    Attributes:
        split: nodes with stragglers get groups of different sizes.
        symmetric: all types of devices have the same degree.
        published: SCIP forms the pipelines by AutoHet's equation 3, without later exchanges of groups.
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
    until: float | None = None,
    safety: float = SAFETY,
    market: Market | None = None,
) -> list[SearchCandidate]:
    """Return candidates for equal sequences, the most promising first.

    Args:
        reach: tokens that must fit in every pipeline's memory; default: the tokens of a micro-batch.
    """
    nodes = nodes_of(costs)
    if not nodes:
        raise Unsupported("all devices are lost", where="plan", remedy="give at least one rank a finite health rate")
    free = free_bytes(costs, sequences * length, safety)
    best = math.inf
    by_shape: dict[object, SearchCandidate] = {}
    seconds_by_shape: dict[object, float] = {}
    last = math.inf  # seconds of the worst candidate to keep

    def worth() -> float:
        return min(WITHIN * best, last)

    sizes, useful = sizes_of(costs, sequences, length)
    market = market or Market(costs)
    for together in sizes:
        before = best
        prices = market.prices((length,) * together, reach)
        micro_batches = -(-sequences // together)
        if by_shape and is_late(until):
            break
        for groups in groupings(costs, prices, nodes, split=way.split, symmetric=way.symmetric):
            if by_shape and is_late(until):
                break
            bench = _bench(costs, prices, groups, micro_batches, free)
            counts = {bench.forms.index(form): n for form, n in forms_of(groups).items()}
            if micro_batches * bench.layers / sum(bench.speed[i] * n for i, n in counts.items()) > WITHIN * best:
                continue
            for partition in _published(bench, counts, until) if way.published else _partitions(bench, counts, worth):
                if by_shape and is_late(until):
                    break
                if partition.seconds > WITHIN * best or not math.isfinite(partition.seconds):
                    continue
                best = min(best, partition.seconds)
                candidate = SearchCandidate(bench, partition, groups, together, way.name)
                shape = candidate.shape
                if shape not in by_shape or partition.seconds < by_shape[shape].seconds:
                    by_shape[shape] = candidate
                    seconds_by_shape[shape] = partition.seconds
                    last = nsmallest(KEPT, seconds_by_shape.values())[-1] if len(seconds_by_shape) >= KEPT else math.inf
        if together > max(useful, 2) and best >= before:
            break
    first = sorted(by_shape.values(), key=lambda candidate: candidate.seconds)[:KEPT]
    gaining = [] if way.published else first[:IMPROVED]
    better = [_improved(candidate, until) for candidate in gaining if not is_late(until)]
    return sorted([*better, *first], key=lambda candidate: candidate.seconds)


def fits(costs: Costs, sequences: int, length: int, safety: float = SAFETY) -> bool:
    """Return whether any pipelines fit with one sequence per micro-batch.

    Args:
        safety: usable fraction of memory; may be above 1.
    """
    nodes = nodes_of(costs)
    free = free_bytes(costs, sequences * length, safety)
    prices = Prices(costs, [length])
    for groups in groupings(costs, prices, nodes, split=False):
        bench = _bench(costs, prices, groups, sequences, free)
        counts = {bench.forms.index(form): n for form, n in forms_of(groups).items()}
        if any(math.isfinite(partition.seconds) for partition in _partitions(bench, counts)):
            return True
    return False


def _partitions(
    bench: Bench, counts: dict[int, int], worth: Callable[[], float] = lambda: math.inf
) -> Iterator[Partition]:
    fits = False
    for used, idle in _uses(bench, counts):
        for number in numbers(sum(used.values()), bench.micro_batches, bench.layers):
            pipelines = bench.balanced(used, number)
            seconds = bench.price(pipelines, worth())
            fits = fits or math.isfinite(seconds)
            yield Partition(tuple(sorted(pipelines.items())), idle, seconds)
    if not fits:
        yield from _largest(bench, counts)


def _uses(bench: Bench, counts: dict[int, int]) -> Iterator[tuple[dict[int, int], tuple[int, ...]]]:
    able = {i for i in counts if bench.holds(i)}
    if not able:
        return
    healthy = min(bench.forms[i].rate for i in able)
    quick = frozenset(i for i in able if bench.forms[i].rate <= SLOW * healthy)
    for kept in dict.fromkeys((frozenset(able), quick, *_strong(bench, counts, able))):
        places = bench.micro_batches * bench.layers
        used: dict[int, int] = {}
        for form in sorted(kept, key=lambda i: (-bench.speed[i], i)):
            group_count = min(counts[form], places - sum(used.values()))
            if group_count:
                used[form] = group_count
        idle = tuple(i for i in sorted(counts) for _ in range(counts[i] - used.get(i, 0)))
        yield used, idle


def _strong(bench: Bench, counts: Mapping[int, int], able: Collection[int]) -> Iterator[frozenset[int]]:
    power = {i: bench.speed[i] * counts[i] for i in able}
    of_a_device: dict[DeviceSite, float] = {}
    for i in able:
        form = bench.forms[i]
        of_a_device[form.site] = max(of_a_device.get(form.site, 0.0), bench.speed[i] / form.tp)
    kept = frozenset(able)
    for site in sorted(of_a_device, key=lambda each: of_a_device[each])[:-1]:
        kept = frozenset(i for i in kept if bench.forms[i].site != site)
        if sum(power[i] for i in kept) < (1 - WEAK) * sum(power.values()):
            return
        yield kept


def _largest(bench: Bench, counts: dict[int, int]) -> Iterator[Partition]:
    every = [i for i in sorted(counts, key=lambda i: (-bench.memory[i], -bench.speed[i], i)) for _ in range(counts[i])]
    for stages in range(1, min(len(every), bench.layers) + 1):
        if not bench.holds(every[stages - 1]):
            return
        pipeline = tuple(sorted(every[:stages]))
        yield Partition(((pipeline, 1),), tuple(sorted(every[stages:])), bench.price({pipeline: 1}))


def _published(bench: Bench, counts: dict[int, int], until: float | None) -> Iterator[Partition]:
    forms = sorted(counts)
    kinds = [EntityKind(bench.speed[i], bench.memory[i], counts[i]) for i in forms]
    if min(kind.memory for kind in kinds) <= 0:
        return
    try:
        grouping = most_power_by_scip(kinds, bench.micro_batches, bench.least_bytes, until)
    except NothingHolds:
        return
    if not grouping.groups:
        return
    pipelines = Counter(
        tuple(sorted(form for form, n in zip(forms, group, strict=True) for _ in range(n))) for group in grouping.groups
    )
    yield Partition(tuple(sorted(pipelines.items())), (), bench.price(pipelines))


def _improved(candidate: SearchCandidate, until: float | None) -> SearchCandidate:
    start = Counter(dict(candidate.partition.pipelines))
    partition = candidate.bench.improved(start, candidate.partition.idle, until)
    return SearchCandidate(candidate.bench, partition, candidate.groups, candidate.together, candidate.origin)


def _bench(
    costs: Costs, prices: Prices, groups: Sequence[Group], micro_batches: int, free: Mapping[int, float]
) -> Bench:
    forms = list(forms_of(groups))
    least = dict.fromkeys(forms, math.inf)
    for group in groups:
        least[group.form] = min(least[group.form], *(free[rank] for rank in group.devices))
    return Bench(prices, forms, [least[form] for form in forms], micro_batches, alone=costs.ranks == 1)


def sizes_of(costs: Costs, sequences: int, length: int) -> tuple[list[int], int]:
    """Return the micro-batch sizes to try, and a size; the first larger one without gain ends the search."""
    useful = max(max(profile.util.values(), default=1) for profile in costs.profiles)
    sizes = [1]
    while 2 * sizes[-1] <= min(sequences, LARGEST):
        sizes.append(2 * sizes[-1])
    return sizes, 2 * useful // length

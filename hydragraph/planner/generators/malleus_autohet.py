"""Search for plans for equal sequences, over degrees, groups, numbers of pipelines and micro-batch sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nsmallest

from hydragraph.cost.costs import Costs
from hydragraph.planner.deadline import is_late
from hydragraph.planner.exact.autohet_grouping import EntityKind, NothingHolds, most_power_by_scip
from hydragraph.planner.generators.device_groups import Group, forms_of, groupings, nodes_of
from hydragraph.planner.generators.group_prices import SAFETY, DeviceSite, GroupPrices, LayerPrices, free_bytes
from hydragraph.planner.generators.pipelines_of_groups import Partition, PipelinePricing, numbers
from hydragraph.planner.price_candidate import SearchCandidate

# Maximum partitions that exchanges improve, and maximum to keep.
IMPROVED = 6
KEPT = 12
# Partitions are kept up to this multiple of the best time.
WITHIN = 1.25
# Groups slower than the healthiest by this factor may stay idle.
SLOW = 1.5
# Groups of the weakest devices may stay idle, up to this fraction of all power.
WEAK = 0.3
# Sequences per micro-batch to try.
SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class SearchMethod:
    """A search method.

    Attributes:
        split: nodes with stragglers get groups of different sizes.
        symmetric: all types of devices have the same degree.
        published: SCIP forms pipelines by AutoHet's equation 3, without later exchanges of groups.
    """

    name: str
    split: bool
    symmetric: bool
    published: bool = False


MIXED = SearchMethod("mixed", split=False, symmetric=False)
STRAGGLER = SearchMethod("straggler", split=True, symmetric=True)
PUBLISHED = SearchMethod("scip", split=False, symmetric=True, published=True)
TOGETHER = SearchMethod("auto", split=True, symmetric=False)


def search(
    costs: Costs,
    sequences: int,
    length: int,
    way: SearchMethod,
    *,
    reach: int = 0,
    until: float | None = None,
    safety: float = SAFETY,
    group_prices: GroupPrices | None = None,
) -> list[SearchCandidate]:
    """Return candidates for equal sequences, the most promising first.

    Args:
        reach: tokens that must fit in every pipeline's memory; default: the tokens of a micro-batch.
    """
    nodes = nodes_of(costs)
    free = free_bytes(costs, sequences * length, safety)
    best = math.inf
    by_shape: dict[object, SearchCandidate] = {}
    last = math.inf

    def worth() -> float:
        return min(WITHIN * best, last)

    sizes, useful = sizes_of(costs, sequences, length)
    group_prices = group_prices or GroupPrices(costs)
    for together in sizes:
        before = best
        prices = group_prices.prices((length,) * together, reach)
        micro_batches = -(-sequences // together)
        if by_shape and is_late(until):
            break
        for groups in groupings(costs, prices, nodes, split=way.split, symmetric=way.symmetric):
            if by_shape and is_late(until):
                break
            bench = _bench(prices, groups, micro_batches, free)
            counts = {bench.forms.index(form): n for form, n in forms_of(groups).items()}
            # Even computing all the time without traffic, these groups would take too long.
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
                    if len(by_shape) >= KEPT:
                        last = nsmallest(KEPT, (each.seconds for each in by_shape.values()))[-1]
        # Above this size, larger micro-batches only lengthen the bubble: the first without gain is
        # the last.
        if together > max(useful, 2) and best >= before:
            break
    first = sorted(by_shape.values(), key=lambda candidate: candidate.seconds)[:KEPT]
    gaining: list[SearchCandidate] = [] if way.published else first[:IMPROVED]
    better = [_improved(candidate, until) for candidate in gaining if not is_late(until)]
    return sorted([*better, *first], key=lambda candidate: candidate.seconds)


def fits(costs: Costs, sequences: int, length: int, safety: float = SAFETY) -> bool:
    """Return whether any pipelines fit with one sequence per micro-batch; `safety`, the usable fraction of memory, may
    be above 1.
    """
    nodes = nodes_of(costs)
    free = free_bytes(costs, sequences * length, safety)
    prices = LayerPrices(costs, [length])
    for groups in groupings(costs, prices, nodes, split=False):
        bench = _bench(prices, groups, sequences, free)
        counts = {bench.forms.index(form): n for form, n in forms_of(groups).items()}
        if any(math.isfinite(partition.seconds) for partition in _partitions(bench, counts)):
            return True
    return False


def _partitions(
    bench: PipelinePricing, counts: dict[int, int], worth: Callable[[], float] = lambda: math.inf
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


def _uses(bench: PipelinePricing, counts: dict[int, int]) -> Iterator[tuple[dict[int, int], tuple[int, ...]]]:
    # Candidates: all groups that can hold a layer; the healthy ones; all but the weakest devices.
    able = {i for i in counts if bench.holds(i)}
    if not able:
        return
    healthy = min(bench.forms[i].rate for i in able)
    quick = frozenset(i for i in able if bench.forms[i].rate <= SLOW * healthy)
    for kept in dict.fromkeys((frozenset(able), quick, *_strong(bench, counts, able))):
        places = bench.micro_batches * bench.layers
        used: dict[int, int] = {}
        for form in sorted(kept, key=lambda i: (-bench.speed[i], i)):
            # More groups than layers of micro-batches would be idle.
            group_count = min(counts[form], places - sum(used.values()))
            if group_count:
                used[form] = group_count
        idle = tuple(i for i in sorted(counts) for _ in range(counts[i] - used.get(i, 0)))
        yield used, idle


def _strong(bench: PipelinePricing, counts: Mapping[int, int], able: Collection[int]) -> Iterator[frozenset[int]]:
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


def _largest(bench: PipelinePricing, counts: dict[int, int]) -> Iterator[Partition]:
    # Last resort: one pipeline of the groups with most memory.
    every = [i for i in sorted(counts, key=lambda i: (-bench.memory[i], -bench.speed[i], i)) for _ in range(counts[i])]
    for stages in range(1, min(len(every), bench.layers) + 1):
        if not bench.holds(every[stages - 1]):
            return
        pipeline = tuple(sorted(every[:stages]))
        yield Partition(((pipeline, 1),), tuple(sorted(every[stages:])), bench.price({pipeline: 1}))


def _published(bench: PipelinePricing, counts: dict[int, int], until: float | None) -> Iterator[Partition]:
    forms = sorted(counts)
    kinds = [EntityKind(bench.speed[i], bench.memory[i], counts[i]) for i in forms]
    if min(kind.memory for kind in kinds) <= 0:
        return
    with suppress(NothingHolds):
        grouping = most_power_by_scip(kinds, bench.micro_batches, bench.least_bytes, until)
        multisets = (zip(forms, group, strict=True) for group in grouping.groups)
        pipelines = Counter(tuple(form for form, n in multiset for _ in range(n)) for multiset in multisets)
        if pipelines:
            yield Partition(tuple(sorted(pipelines.items())), (), bench.price(pipelines))


def _improved(candidate: SearchCandidate, until: float | None) -> SearchCandidate:
    partition = candidate.partition
    return replace(candidate, partition=candidate.bench.improved(dict(partition.pipelines), partition.idle, until))


def _bench(
    prices: LayerPrices, groups: Sequence[Group], micro_batches: int, free: Mapping[int, float]
) -> PipelinePricing:
    least = dict.fromkeys(forms_of(groups), math.inf)
    for group in groups:
        least[group.form] = min(least[group.form], *(free[rank] for rank in group.devices))
    return PipelinePricing(prices, list(least), list(least.values()), micro_batches)


def sizes_of(costs: Costs, sequences: int, length: int) -> tuple[list[int], int]:
    """Return the micro-batch sizes to try, and the size above which the first without gain is the last."""
    useful = max(max(profile.util.values(), default=1) for profile in costs.profiles)
    return [size for size in SIZES if size <= sequences], 2 * useful // length

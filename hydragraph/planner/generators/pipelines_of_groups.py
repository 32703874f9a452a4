"""Assembly of tensor-parallel groups into pipelines: balanced partitions, improved by exchanges of groups.

A pipeline is a multiset of forms (kinds of equal groups). Its first stage, which stores the most micro-batches, is the
slowest group (Malleus, theorem 3; AutoHet) or the one with most memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from hydragraph.planner.deadline import is_late
from hydragraph.planner.generators.device_groups import GroupForm
from hydragraph.planner.generators.group_prices import LayerPrices
from hydragraph.planner.generators.pipeline_shares import least_seconds
from hydragraph.planner.generators.stage_layout import NUMBERS, awaited, most_layers, spread_over, timed
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind

Multiset = tuple[int, ...]
# Every number of pipelines up to this is tried.
EVERY = 16
# Maximum partitions to price per improvement.
EXCHANGES = 1500


@dataclass(frozen=True)
class PipelineLayout:
    """A multiset of groups laid out as a pipeline, with times in seconds.

    Attributes:
        first_s: first micro-batch, including `exposed_s`.
        exposed_s: pull and push that computation does not hide.
        each_s: every further micro-batch.
        traffic_s: the slowest rank's pull and push alone.
        stages_s: each stage's time for a micro-batch [stages].
        passing_s: each layer's pull and push [layers].
    """

    order: Multiset
    layers: tuple[int, ...]
    kinds: tuple[StageKind, ...]
    first_s: float
    exposed_s: float
    each_s: float
    traffic_s: float
    stages_s: NDArray[np.float64]
    passing_s: NDArray[np.float64]


NOTHING_FITS = PipelineLayout((), (), (), math.inf, 0.0, math.inf, 0.0, np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Partition:
    """Pipelines, as pairs (multiset of forms, count), and idle groups."""

    pipelines: tuple[tuple[Multiset, int], ...]
    idle: Multiset
    seconds: float

    @property
    def count(self) -> int:
        return sum(n for _, n in self.pipelines)


class PipelinePricing:
    """Pricing of pipelines of groups; `memory` is, by form, the bytes that a rank's share of the state leaves free."""

    def __init__(
        self, prices: LayerPrices, forms: Sequence[GroupForm], memory: Sequence[float], micro_batches: int
    ) -> None:
        self.forms = tuple(forms)
        self.micro_batches = micro_batches
        self.layers = prices.layers
        self._prices = prices
        self.memory = tuple(memory)

        self.options = [prices.options(form.site, form.tp) for form in self.forms]
        # Numbers of form i's option o; infinite if missing, so that it is never chosen.
        self._numbers = np.full((len(forms), max(map(len, self.options), default=0), len(NUMBERS)), math.inf)
        for i, form in enumerate(self.forms):
            self._numbers[i, : len(self.options[i])] = prices.numbers(form.site, form.tp)
        # Per form: slowdown, free bytes, seconds per byte of pull and push.
        rows = [(f.rate, free, self._passing(f)) for f, free in zip(self.forms, self.memory, strict=True)]
        self._rows = np.array(rows).reshape(-1, 3)
        self.speed = [1 / (form.rate * min(o.layer_s for o in self.options[i])) for i, form in enumerate(self.forms)]
        every = range(len(self.forms))
        slow_first = sorted(every, key=lambda i: (self.speed[i], -self.memory[i], i))
        large_first = sorted(every, key=lambda i: (-self.memory[i], self.speed[i], i))
        self._places = [{form: place for place, form in enumerate(order)} for order in (slow_first, large_first)]
        self._laid: dict[tuple[Multiset, int], PipelineLayout] = {}

    @property
    def least_bytes(self) -> float:
        """Minimum memory of all layers in bytes, with one micro-batch in flight."""
        options = [option for every in self.options for option in every]
        return self.layers * min(option.state_bytes + option.kept_bytes for option in options)

    def holds(self, form: int) -> bool:
        bytes_per_byte = self._prices.held_by_flight[1, 1]
        options = self._numbers[form, : len(self.options[form])]
        most = (most_layers(o, self.memory[form], False, False, bytes_per_byte, 1, self.layers) for o in options)
        return max(most, default=0) > 0

    def lay(self, multiset: Multiset, count: int) -> PipelineLayout:
        """Arrange groups as a pipeline for about `count` micro-batches."""
        # Above four per stage, more micro-batches do not change the layout.
        key = (multiset, min(count, 4 * len(multiset)))
        if key not in self._laid:
            slow_first, large_first = (tuple(sorted(multiset, key=place.__getitem__)) for place in self._places)
            laid = [self._order(order, count) for order in dict.fromkeys((slow_first, large_first))]
            # Neither order fits: try the two largest groups at the ends, which hold the embedding
            # and the head.
            if not any(layout.order for layout in laid):
                ends = (*large_first[:1], *large_first[2:], *large_first[1:2])
                laid += [self._order(order, count) for order in (ends, large_first[::-1])]
            able = [layout for layout in laid if layout.order]
            self._laid[key] = min(able, key=lambda e: e.first_s + (count - 1) * e.each_s, default=NOTHING_FITS)
        return self._laid[key]

    def _order(self, order: Multiset, count: int) -> PipelineLayout:
        if len(order) > self.layers:
            return NOTHING_FITS
        held_by_flight = self._prices.held_by_flight
        layers, chosen = spread_over(np.array(order), self.layers, count, self._numbers, self._rows, held_by_flight)
        return self.laid_as(order, layers, chosen) if len(layers) else NOTHING_FITS

    def laid_as(self, order: Multiset, layers: NDArray[np.int64], chosen: NDArray[np.int64]) -> PipelineLayout:
        first, further, exposed, traffic, seconds, passing = timed(
            np.array(order), layers, chosen, self._numbers, self._rows
        )
        kinds = tuple(self.options[i][o].kind for i, o in zip(order, chosen.tolist(), strict=True))
        return PipelineLayout(order, tuple(layers.tolist()), kinds, first, exposed, further, traffic, seconds, passing)

    def passing(self, form: int, size: float) -> float:
        return size * float(self._rows[form, 2])

    def _passing(self, form: GroupForm) -> float:
        if self._prices.costs.ranks == 1:
            return 0.0
        site = form.site
        # With equal shares, the fraction `away` of the state crosses the node's network cards.
        away = 1 - self._prices.within(site)
        return max(away / (site.outer.bytes_per_s * min(1.0, site.cards)), (1 - away) / site.inner.bytes_per_s)

    def price(self, pipelines: Mapping[Multiset, int], worth: float = math.inf) -> float:
        """Return the iteration time in seconds; if it is at least `worth`, it may be a lower bound."""
        number = sum(pipelines.values())
        count = max(1, round(self.micro_batches / number))
        return self.price_of({multiset: self.lay(multiset, count) for multiset in pipelines}, pipelines, worth)

    def price_of(
        self, by_multiset: Mapping[Multiset, PipelineLayout], pipelines: Mapping[Multiset, int], worth: float = math.inf
    ) -> float:
        laid = [by_multiset[multiset] for multiset in pipelines]
        if any(not layout.order for layout in laid):
            return math.inf
        first = np.array([layout.first_s for layout in laid])
        each_s = np.array([layout.each_s for layout in laid])
        alike = np.array(list(pipelines.values()), dtype=np.int64)
        seconds = float(least_seconds(self.micro_batches, first, each_s, alike))
        # Pipelines wait for each other to pull and push a layer. This is slow to compute, so skip
        # partitions that take too long anyway.
        if len(laid) > 1 and seconds < worth:
            seconds = float(least_seconds(self.micro_batches, first + self.awaited(laid), each_s, alike))
        # Traffic overlaps computation.
        return max(seconds, max(layout.traffic_s for layout in laid))

    def awaited(self, laid: Sequence[PipelineLayout]) -> list[float]:
        if len(laid) == 1:
            return [0.0]
        slowest = np.maximum.reduce([layout.passing_s for layout in laid])
        return [awaited(layout.stages_s, np.array(layout.layers), layout.passing_s, slowest) for layout in laid]

    def balanced(self, groups: Mapping[int, int], number: int) -> Counter[Multiset]:
        """Return a partition of groups (counts by form) into `number` pipelines: each group, from fast to slow, joins
        the slowest so far.
        """
        # The fastest form is divided evenly; others join one at a time.
        first, *others = sorted(groups, key=lambda i: (-self.speed[i], i))
        turns, more = divmod(groups[first], number)
        first_counts = [turns + 1] * more + [turns] * (number - more)
        quick = [0.0, *accumulate(repeat(self.speed[first], turns + 1))]
        # (speed, number of stages, index): of equally fast pipelines, the shortest is first.
        queue = [(quick[n], n, p) for p, n in enumerate(first_counts)]
        heapq.heapify(queue)
        members: dict[int, list[int]] = {}
        for form in others:
            for _ in range(groups[form]):
                speed, depth, p = heapq.heappop(queue)
                members.setdefault(p, []).append(form)
                heapq.heappush(queue, (speed + self.speed[form], depth + 1, p))
        alone = {n: (first,) * n for n in dict.fromkeys(first_counts)}
        return Counter(
            tuple(sorted((*alone[n], *members[p]))) if p in members else alone[n] for p, n in enumerate(first_counts)
        )

    def improved(self, start: Mapping[Multiset, int], idle: Multiset = (), until: float | None = None) -> Partition:
        now = dict(start)
        resting = idle
        best = self.price(now)
        left = EXCHANGES
        gained = True
        # First, not best improvement: the neighborhood grows with the square of the forms.
        while gained and left > 0:
            gained = False
            for pipelines, unused in self._neighbours(now, resting):
                left -= 1
                seconds = self.price(pipelines, best)
                if seconds < best * (1 - 1e-9):
                    now = pipelines
                    resting = unused
                    best = seconds
                    gained = True
                    break
                if left <= 0 or is_late(until):
                    left = 0
                    break
        return Partition(tuple(sorted(now.items())), resting, best)

    def _neighbours(
        self, now: Mapping[Multiset, int], idle: Multiset
    ) -> Iterator[tuple[dict[Multiset, int], Multiset]]:
        count = max(1, round(self.micro_batches / sum(now.values())))
        slowest = sorted(now, key=lambda m: -self.lay(m, count).each_s)
        for giving in slowest:
            for form in dict.fromkeys(giving):
                # A group becomes idle, or joins another pipeline.
                if len(giving) > 1:
                    yield _exchanged(now, (giving, _less(giving, form))), _more(idle, form)
                    for taking in now:
                        if taking != giving or now[giving] > 1:
                            yield _exchanged(now, (giving, _less(giving, form)), (taking, _more(taking, form))), idle
        # Two pipelines exchange groups of different forms.
        for one in slowest:
            for other in now:
                if other == one:
                    continue
                for a in dict.fromkeys(one):
                    for b in dict.fromkeys(other):
                        if a != b:
                            changed = (one, _more(_less(one, a), b)), (other, _more(_less(other, b), a))
                            yield _exchanged(now, *changed), idle
        # An idle group joins a pipeline.
        for form in dict.fromkeys(idle):
            for taking in now:
                yield _exchanged(now, (taking, _more(taking, form))), _less(idle, form)


def pipeline_of(devices: Iterable[Sequence[int]], layers: Sequence[int], kinds: Sequence[StageKind]) -> Pipeline:

    stages = zip(devices, layers, kinds, strict=True)
    return Pipeline(tuple(Stage.of(tuple(stage_devices), count, kind) for stage_devices, count, kind in stages))


def numbers(groups: int, micro_batches: int, layers: int) -> list[int]:
    most = min(groups, micro_batches)
    # A pipeline has at most one group per layer. Many pipelines are tried only with equal depths.
    few = range(-(-groups // layers), min(most, EVERY) + 1)
    deep = (groups // depth for depth in range(1, max(1, groups // EVERY) + 1))
    return sorted({*few, *(n for n in deep if -(-groups // layers) <= n <= most), most})


def _less(multiset: Multiset, form: int) -> Multiset:
    at = multiset.index(form)
    return multiset[:at] + multiset[at + 1 :]


def _more(multiset: Multiset, form: int) -> Multiset:
    return tuple(sorted((*multiset, form)))


def _exchanged(now: Mapping[Multiset, int], *changes: tuple[Multiset, Multiset]) -> dict[Multiset, int]:
    counts = dict(now)
    for before, _ in changes:
        counts[before] -= 1
        if not counts[before]:
            del counts[before]
    for _, after in changes:
        counts[after] = counts.get(after, 0) + 1
    return counts

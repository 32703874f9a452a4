"""Choice of a home, which assigns each bucket's state to owners.

Let x_b be the fractions of bucket b that ranks own (`cost.home_candidates`). Under strategy s, let p_s(x), q_s(x) and
h_s(x) be the slowest rank's seconds for pulling the bucket, pushing its gradients and sending their sums to second
owners. With w_s the frequency of strategy s, choose

    x_b = argmin  e_b(x),   e_b(x) = sum_s w_s (p_s(x) + q_s(x) + h_s(x))

Among candidates with equal e_b, choose one that moves the fewest bytes, then one whose largest fraction is smallest.
Exchanges run one after another, so owners are chosen separately for each bucket. If their memory does not suffice, a
linear program chooses the owners of all buckets (`cost.home_room`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hydragraph.cost.exchanges import elements_sent, transfers
from hydragraph.cost.home_candidates import FEW, Parts, Stages, candidates
from hydragraph.cost.home_room import within
from hydragraph.cost.traffic import RankLinks, Transfers
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import Layout
from hydragraph.ir.layout import home as home_layout
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program_outline import Outline
from hydragraph.passes.place import place
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

SAME = 1e-9


@dataclass(frozen=True)
class HomeQuestion:
    """Inputs that determine a home.

    Attributes:
        home: home whose shares, nodes, copies and fixed buckets are kept.
        itemsize, push_itemsize: bytes of a pulled weight and of a pushed gradient.
        weights: frequency of each strategy; None: equal.
        health: slow ranks own less state, and lost ranks none.
        room: number of elements that fit in each rank's memory; None: unlimited.
    """

    outline: Outline
    buckets: tuple[Bucket, ...]
    strategies: tuple[Strategy, ...]
    cluster: Cluster
    home: Home
    itemsize: int = 4
    weights: tuple[float, ...] | None = None
    health: Health = Health()  # noqa: RUF009
    room: tuple[float, ...] | None = None
    push_itemsize: int = GRADIENT_BYTES


@dataclass(frozen=True)
class BucketClass:
    """Buckets of equal form that the same stages use; their owners are chosen together."""

    buckets: tuple[Bucket, ...]
    users: dict[int, Stages]


def choose_home(question: HomeQuestion) -> Home:
    """Return the home that the question's rule chooses; a home without a rule is returned unchanged."""
    home = question.home
    if home.rule is None:
        return home
    home.check(len(question.cluster.devices))
    choice = _Choice(question)
    parts = choice.parts()
    plain = {name: numbers(bucket_parts) for name, bucket_parts in parts.items()}
    equal = (1.0,) * choice.ranks
    if len({*plain.values()}) == 1 and not home.buckets:
        (shares,) = {*plain.values()}
        return Home(None if shares == equal else shares, home.copies, nodes=home.nodes)
    usual = choice.usual
    others = {name: shares for name, shares in plain.items() if shares != (usual or equal)}
    return replace(home, shares=usual, rule=None, buckets={**others, **home.buckets})


def expected_s(question: HomeQuestion, home: Home) -> float:
    """Return the expected seconds of all exchanges under a home, the sum of all e_b."""
    choice = _Choice(replace(question, home=home))
    total = 0.0
    for bucket_class in choice.classes(without=()):
        for bucket in bucket_class.buckets:
            shares = np.asarray(home.shares_of(bucket.name) or (1.0,) * choice.ranks, float)
            total += choice.price(bucket_class, shares / shares.sum())[0]
    return total


def numbers(parts: Parts) -> tuple[float, ...]:
    """Convert fractions to relative shares, in whole numbers if possible."""
    shares = parts / parts[parts > 0].min()
    whole = np.rint(shares)
    return tuple(map(float, whole if np.allclose(shares, whole, rtol=0, atol=1e-6) else parts / parts.max()))


class _Choice:
    def __init__(self, question: HomeQuestion) -> None:
        self._question = question
        self.ranks = len(question.cluster.devices)
        count = len(question.strategies)
        weights = np.asarray(question.weights or (1.0,) * count, float)
        self._weights: list[float] = (weights / weights.sum()).tolist()
        nodes = question.home.nodes or [device.node for device in question.cluster.devices]
        self._nodes = list(range(self.ranks)) if len(set(nodes)) == 1 else list(nodes)
        # Fractions are proportional to a rank's share, divided by its slowdown (infinite for lost
        # ranks).
        shares = np.asarray(question.home.shares or (1.0,) * self.ranks, float)
        self._ability = shares / np.array([question.health.rate(rank) for rank in range(self.ranks)])
        self._known: dict[object, tuple[float, float]] = {}

    @property
    def usual(self) -> tuple[float, ...] | None:
        """Shares for buckets that no stage uses, 0 for lost ranks; None: equal shares."""
        shares = self._question.home.shares
        if not self._question.health.lost:
            return None if shares is None else tuple(shares)
        return numbers(np.where(self._ability > 0, shares or (1.0,) * self.ranks, 0.0))

    def parts(self) -> dict[str, Parts]:
        classes = self.classes(without=tuple(self._question.home.buckets))
        narrow = self._question.home.rule == "stages"
        ranked = [self._ranked(bucket_class, wide=not narrow and self._mixed(bucket_class)) for bucket_class in classes]
        best = {b.name: row[0] for bucket_class, row in zip(classes, ranked, strict=True) for b in bucket_class.buckets}
        # Each bucket's best owners, if they fit; otherwise all buckets are chosen together.
        if narrow or self._question.room is None or self._fits(classes, best):
            return best
        return self._repaired(classes) or best

    def classes(self, without: Sequence[str]) -> list[BucketClass]:
        question = self._question
        holders = [
            dict(place(question.outline, strategy, [1] * len(strategy.pipelines)).holders)
            for strategy in question.strategies
        ]
        buckets_by_key: dict[tuple[Any, ...], list[Bucket]] = {}
        for bucket in question.buckets:
            # Strategy index -> stages that use the bucket. Equal keys mean equal costs under every
            # home.
            used = {
                number: strategy_holders[bucket.name]
                for number, strategy_holders in enumerate(holders)
                if bucket.name in strategy_holders
            }
            if used and bucket.name not in without:
                key = (bucket.form, bucket.learns, tuple(used.items()))
                buckets_by_key.setdefault(key, []).append(bucket)
        return [BucketClass(tuple(buckets), dict(key[-1])) for key, buckets in buckets_by_key.items()]

    def _mixed(self, each: BucketClass) -> bool:
        cluster = self._question.cluster
        if len(self._question.strategies) > 1 or len(cluster.types) > 1 or cluster.pairs:
            return True
        stages = [stage for stages in each.users.values() for stage in stages]
        on_nodes = Counter(cluster.node_of(rank) for stage in stages for rank in stage)
        return self.ranks <= FEW and (len({*map(len, stages)}) > 1 or len({*on_nodes.values()}) > 1)

    def _candidates(self, each: BucketClass, wide: bool) -> list[Parts]:
        copies = self._question.home.copies
        return candidates(each.users, self._weights, self._ability, copies, self._nodes, wide)

    def _ranked(self, each: BucketClass, wide: bool) -> list[Parts]:
        choices = self._candidates(each, wide)
        if len(choices) == 1 or self._question.home.rule == "stages":
            return choices
        priced = [(*self.price(each, parts), float(parts.max())) for parts in choices]
        # Seconds, bytes and largest fractions within SAME count as equal.
        units = [max((row[i] for row in priced), default=0.0) * SAME or 1.0 for i in range(3)]
        order = sorted(range(len(choices)), key=lambda i: [round(v / u) for v, u in zip(priced[i], units, strict=True)])
        return [choices[i] for i in order]

    def price(self, each: BucketClass, parts: Parts) -> tuple[float, float]:
        bucket = each.buckets[0]
        key = (id(each), tuple(parts))
        if key not in self._known:
            copies = self._question.home.copies
            nodes = self._nodes if copies > 1 else None
            owners = home_layout(bucket.size, range(self.ranks), parts.tolist(), copies, nodes=nodes)
            rows = [
                (self._weights[number], moved)
                for number, stages in each.users.items()
                for moved in self._exchanges(bucket, owners, stages, self._splits(number))
            ]
            self._known[key] = (
                sum(weight * self._roads.slowest_s(moved) for weight, moved in rows),
                sum(weight * moved.total for weight, moved in rows),
            )
        return self._known[key]

    @cached_property
    def _roads(self) -> RankLinks:
        ranks = np.arange(self.ranks)
        rates = np.array([self._question.health.rate(rank) for rank in ranks.tolist()])
        return RankLinks(self._question.cluster, ranks, np.where(np.isfinite(rates), rates, 1.0))

    def _splits(self, number: int) -> bool:
        stages = (stage for pipeline in self._question.strategies[number].pipelines for stage in pipeline.stages)
        return any(stage.sequence_parallel for stage in stages)

    def _exchanges(self, bucket: Bucket, owners: Layout, stages: Stages, splits: bool) -> list[Transfers]:
        # Numba is imported only if there is a choice
        from hydragraph.ir.link_volume import handed_on

        sent = [(elements_sent(Op.PULL, bucket, owners, stages, splits, self.ranks), self._question.itemsize)]
        if bucket.learns:
            pushed = elements_sent(Op.PUSH, bucket, owners, stages, splits, self.ranks)
            sent.append((pushed, self._question.push_itemsize))
            if self._question.home.copies > 1:
                sent.append((handed_on(owners, self.ranks), GRADIENT_BYTES))
        return [transfers(elements, size, self._question.cluster) for elements, size in sent]

    def _fits(self, classes: Sequence[BucketClass], parts: dict[str, Parts]) -> bool:
        room = self._question.room
        assert room is not None, "`room` must be known"
        owned = sum(
            (self._copied(b) * parts[b.name] for bucket_class in classes for b in bucket_class.buckets),
            np.zeros(self.ranks),
        )
        return bool((owned <= np.asarray(room)).all())

    def _copied(self, bucket: Bucket) -> int:
        return self._question.home.copies * bucket.size

    def _repaired(self, classes: Sequence[BucketClass]) -> dict[str, Parts] | None:
        room = np.asarray(self._question.room, float)
        able = np.where(self._ability > 0, np.maximum(room, 0.0), 0.0)
        if not able.sum():
            return None
        choices = []
        for bucket_class in classes:
            class_choices = self._candidates(bucket_class, wide=True)
            # With limited room, also allow single owners, and fractions proportional to free
            # memory.
            if self._question.home.copies == 1:
                class_choices += [one for rank, one in enumerate(np.eye(self.ranks)) if able[rank]]
            elif len({node for node, free in zip(self._nodes, able, strict=True) if free}) > 1:
                class_choices += candidates({0: ()}, [1.0], able, 2, self._nodes, wide=True)
            choices.append([*class_choices, able / able.sum()] if self._question.home.copies == 1 else class_choices)
        seconds = [
            [self.price(bucket_class, p)[0] for p in row] for bucket_class, row in zip(classes, choices, strict=True)
        ]
        counts = [len(bucket_class.buckets) for bucket_class in classes]
        sizes = [self._copied(bucket_class.buckets[0]) for bucket_class in classes]
        dealt = within(counts, sizes, choices, seconds, room)
        if dealt is None:
            return None
        every = zip(classes, dealt, strict=True)
        return {
            b.name: parts for bucket_class, row in every for b, parts in zip(bucket_class.buckets, row, strict=True)
        }

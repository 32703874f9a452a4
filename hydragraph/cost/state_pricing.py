"""Memory of ranks: the state that each of them owns, and its walk through a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from hydragraph.cost.corrections import Corrections
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.rank_memory import PricedBlocks, Walk
from hydragraph.cost.stage_pricing import StagePricing
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES, WEIGHT_BYTES
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import Layout
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy


class StatePricing(StagePricing):
    """Prices of stages and of state; arguments and errors as for `Costs`."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        health: Health | None,
        home: Home,
        blocks: PricedBlocks | None,
        state_bytes: int,
        corrections: Corrections | None,
        push_itemsize: int,
    ) -> None:
        super().__init__(profile, cluster, health, blocks, push_itemsize, corrections)
        self.home = home
        self.state_bytes = state_bytes
        home.check(self.ranks, [bucket.name for bucket in self.buckets])
        placed = home.without_rule.on([device.node for device in cluster.devices])
        self._owners = HomeLayouts(placed, self.ranks)
        self._owned: dict[tuple[int, bool | None], int] = {}

    def home_of(self, bucket: Bucket) -> Layout:
        """Return the home of a bucket."""
        return self._owners.of(bucket)

    def owned(self, rank: int, learning: bool | None = None) -> int:
        """Return how many elements a rank owns; if `learning` is given, only trained or only frozen ones."""
        if (rank, learning) not in self._owned:
            self._owned[rank, learning] = sum(
                times * self.home_of(bucket).local_size(rank)
                for bucket, times in self._alike
                if learning is None or bucket.learns == learning
            )
        return self._owned[rank, learning]

    @cached_property
    def _alike(self) -> list[tuple[Bucket, int]]:
        """One bucket of each form and home, and the number of such buckets."""
        first: dict[object, Bucket] = {}
        counts: Counter[object] = Counter()
        for bucket in self.buckets:
            key = (bucket.form, bucket.learns, self.home_of(bucket))
            first.setdefault(key, bucket)
            counts[key] += 1
        return [(bucket, counts[key]) for key, bucket in first.items()]

    def owned_bytes(self, rank: int) -> int:
        """Return the constant bytes of a rank's shard: weights, optimizer state and gradients."""
        learning = self.owned(rank, True)
        return (self.state_bytes + GRADIENT_BYTES) * learning + WEIGHT_BYTES * self.owned(rank, False)

    def update_s(self, rank: int, elements: int) -> float:
        """Return the seconds of an optimizer's step on some trained elements of a rank; 0 if the rank is lost."""
        update = self.piece_profile(rank).update
        rate = self.health.rate(rank)
        return rate * (update[0] + update[1] * elements) if update is not None and math.isfinite(rate) else 0.0

    def walk(
        self,
        strategy: Strategy,
        batches: Sequence[Sequence[MicroBatch]],
        rank: int,
        messages: bool = True,
        over: Mapping[int, Sequence[str]] | None = None,
    ) -> Walk:
        """Return the walk through one rank's program; arguments as for `cost.rank_memory.Walk`."""
        return Walk(
            self.blocks,
            strategy,
            batches,
            rank,
            self.ranks,
            messages=messages,
            home_of=self.home_of,
            state_bytes=self.state_bytes,
            over=over,
        )


def micro_batches_of(strategy: Strategy, assignment: Assignment) -> list[list[MicroBatch]]:
    """Return the packed micro-batches of every pipeline, padded where their tokens must be divisible."""
    by_pipeline = []
    for pipeline, batches in zip(strategy.pipelines, assignment.tokens, strict=True):
        parts = math.lcm(*(s.tp for s in pipeline.stages if s.kind.sequence_parallel), 1)
        packed = []
        for lengths in batches:
            padding = -sum(lengths) % parts  # a separate sequence
            packed.append(MicroBatch(sum(lengths) + padding, len(lengths) + bool(padding)))
        by_pipeline.append(packed)
    return by_pipeline

"""Costs on a cluster: times of stages, and memory of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING

from hydragraph.cost.accounts import TRANSFERS, TimeKind
from hydragraph.cost.block_pieces import AUX, BlockPiece
from hydragraph.cost.corrections import Corrections, corrected
from hydragraph.cost.exchanges import ring_pairs
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.home_choice import HomeQuestion
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.partial_recomputation import within_budget
from hydragraph.cost.profile_blocks import ProfileBlocks
from hydragraph.cost.published_errors import FLAT, published_error
from hydragraph.cost.rank_memory import MemoryWalk, home_memory
from hydragraph.cost.stage_costs import NeighborMessages, Ring, StageCost
from hydragraph.cost.traffic_bytes import HomeTraffic
from hydragraph.errors import Unsupported
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Interconnect
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import PIECES, StageKind
from hydragraph.spec.strategy import Strategy

if TYPE_CHECKING:
    from hydragraph.cost.rank_memory import Blocks

# Bytes of a message, for comparisons of links.
MESSAGE_BYTES = 1 << 20
RING_TOKENS = 2048


class Pricing:
    """Costs of stages and of state; see `Costs`."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        health: Health | None,
        home: Home,
        blocks: Blocks | None,
        state_bytes: int,
        corrections: Corrections | None,
        push_itemsize: int,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.push_itemsize = push_itemsize
        self.corrections = corrections or Corrections()
        self.health = self.corrections.health if health is None else health
        self.transfer_factors = {kind: self.corrections.factor(kind) for kind in TRANSFERS}
        for rank in self.health:
            if rank >= self.ranks:
                raise ValueError(f"'health' names rank {rank}, but the cluster has ranks 0 to {self.ranks - 1}")
        if not profile.blocks or profile.model_sizes is None:
            raise Unsupported(
                "the profile has constants for whole schemes (tp, pp), not for blocks",
                where=f"profile {profile.name}",
                remedy="measure the model with hydragraph profile, or price it from a datasheet (hydragraph simulate)",
            )
        self._of_type = {name: corrected(profile.of(name), self.corrections, name) for name in cluster.types}
        self.sizes: ModelSizes = profile.model_sizes
        self.outline = self.sizes.outline
        self.buckets = self.sizes.buckets
        self.blocks: Blocks = blocks or ProfileBlocks(self)
        self._within_budget = cache(self._budgeted)
        self.home = home
        self.state_bytes = state_bytes
        home.check(self.ranks, [bucket.name for bucket in self.buckets])
        self.home_of = HomeLayouts(home.without_rule.on([d.node for d in cluster.devices]), self.ranks).of
        traffic = HomeTraffic(self.buckets, self.home_of)
        self.owned = traffic.owned
        self.owned_bytes = cache(lambda rank: home_memory(traffic, rank, state_bytes).home)
        self.walk = partial(MemoryWalk, self.blocks, ranks=self.ranks, traffic=traffic, state_bytes=state_bytes)

    @property
    def ranks(self) -> int:
        return len(self.cluster.devices)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return tuple(self._of_type.values())

    @property
    def measured(self) -> bool:
        """Whether computation was measured, not derived from a datasheet."""
        return all(profile.efficiency is None for profile in self.profiles)

    def source_of(self, *strategies: Strategy) -> str:
        names = ", ".join(profile.name for profile in self.profiles)
        by = f"corrected: {self.corrections}" if self.corrections.types else ""
        what = "; ".join(filter(None, (names, self.error_of(*strategies), by)))
        return f"computation {'as measured' if self.measured else 'is not measured'}: {what}"

    def error_of(self, *strategies: Strategy) -> str:
        """Describe the predictions' mean error on published runs; "" if computation was measured."""
        if self.measured or not strategies:
            return ""
        if not all(profile.roofline for profile in self.profiles):
            return FLAT
        errors = dict.fromkeys(published_error(self.cluster, strategy) for strategy in strategies)
        return f"the mean error of such predictions is {' and '.join(errors)}"

    def rate(self, rank: int) -> float:
        """Return a rank's rate; raise Unsupported if it is lost."""
        rate = self.health.rate(rank)
        if math.isinf(rate):
            raise Unsupported(
                f"rank {rank} is lost", where="costs", remedy="use a strategy without this rank, or change the health"
            )
        return rate

    def link(self, a: int, b: int) -> Interconnect:
        return self.cluster.link(a, b).handled(max(self.rate(a), self.rate(b)))

    def slowest_link(self, ranks: Sequence[int], size: float) -> Interconnect:
        """Return the slowest link in a ring of ranks that send messages of `size` bytes."""
        return max((self.link(a, b) for a, b in ring_pairs(ranks)), key=lambda link: link.seconds(size))

    def piece_profile(self, rank: int) -> Profile:
        return self._of_type[self.cluster.type_of(rank)]

    def memory_of(self, rank: int) -> float:
        """Return the bytes that a rank may use: its device's memory, or the measured free memory if that is less."""
        device = self.piece_profile(rank).device
        size = float(self.cluster.devices[rank].memory_bytes)
        return min(size, device.memory) if device is not None and self.measured else size

    def useful_tokens(self, pipeline: Pipeline) -> int:
        return max(self.piece_profile(rank).util.get(s.tp, 1) for s in pipeline.stages for rank in s.devices)

    def pieces(self, type_: str, kind: StageKind) -> Mapping[str, BlockPiece]:
        profile = self._of_type[type_]
        if kind not in profile.pieces and kind.sums_in_pieces:
            return self.pieces(type_, kind._replace(sums_in_pieces=False))
        if kind not in profile.pieces and not isinstance(kind.recompute, bool):
            return self._within_budget(type_, kind)
        if kind not in profile.pieces:
            why = profile.unfit.get(kind, "they were not measured")
            flags = " --sequence-parallel" * kind.sequence_parallel + " --recompute" * bool(kind.recompute)
            where = f" on device type {type_}" if type_ else ""
            raise Unsupported(
                f"stages of kind {kind.text}{where}: {why}",
                where=f"profile {profile.name}",
                remedy=f"measure them: hydragraph profile --schemes tp{kind.tp}pp1{flags}",
            )
        return profile.pieces[kind]

    def _budgeted(self, type_: str, kind: StageKind) -> Mapping[str, BlockPiece]:
        plain, full = (self.pieces(type_, kind._replace(recompute=again)) for again in (False, True))
        blocks = dict(zip(self.profile.blocks, self.outline.blocks, strict=True))
        shares = {template: self.blocks.repeated(block, kind) for template, block in blocks.items()}
        return within_budget(plain, full, kind.recompute, shares)

    def spans(self, pipeline: Pipeline) -> list[tuple[int, int]]:
        """Return the block positions [first, last) of each stage."""
        ends = accumulate((stage.layers for stage in pipeline.stages), initial=0)
        return [self.outline.span(first, end) for first, end in pairwise(ends)]

    def stages(self, pipeline: Pipeline) -> tuple[StageCost, ...]:
        rows = pipeline.rows
        costs = []
        following = [*pipeline.stages[1:], None]
        for i, (stage, span, after) in enumerate(zip(pipeline.stages, self.spans(pipeline), following, strict=True)):
            cost = self.stage(stage, span, after)
            # Auxiliary values are computed once per device.
            costs.append(replace(cost, aux=()) if rows[i] in rows[:i] else cost)
        return tuple(costs)

    def stage(self, stage: Stage, span: tuple[int, int], following: Stage | None = None) -> StageCost:
        """Return the cost of a stage whose blocks are at the positions `span`, [first, last)."""
        kind = stage.kind
        forwards = []
        backwards = []
        aux = []
        counts = Counter(self.profile.blocks[slice(*span)])
        learning = Counter(self.profile.blocks[slice(*self._learning(span))])
        for name, rate in dict.fromkeys((self.cluster.type_of(r), self.rate(r)) for r in stage.devices):
            pieces = self.pieces(name, kind)
            forwards.append(tuple((rate * n, pieces[t].forward) for t, n in counts.items()))
            backwards.append(tuple((rate * n, pieces[t].backward) for t, n in learning.items()))
            aux.append(((rate, pieces[AUX].forward),) if AUX in pieces else ())
        ahead = back = None
        if following is not None:
            ahead = self.hop(stage, following)
            back = self.hop(following, stage)
        return StageCost(tuple(forwards), tuple(backwards), tuple(aux), self.rings(stage, span), ahead, back)

    def _learning(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return the part of a span that runs a backward: from the first trained block on."""
        return max(span[0], self.outline.lowest), span[1]

    def _blocks(self, stage: Stage, span: tuple[int, int]) -> list[BlockPiece]:
        pieces = self.pieces(self.cluster.type_of(stage.devices[0]), stage.kind)
        return [pieces[template] for template in self.profile.blocks[slice(*span)]]

    def rings(self, stage: Stage, span: tuple[int, int]) -> tuple[Ring, Ring] | None:
        """Return the tensor-parallel sums of a stage's forward and backward, or None."""
        if stage.tp == 1:
            return None
        blocks = self._blocks(stage, span)
        learning = self._blocks(stage, self._learning(span))
        forward = sum(piece.reduced[0] for piece in blocks)
        backward = sum(piece.reduced[1] for piece in learning)
        if not forward and not backward:
            return None
        size = self.sizes.hidden_bytes
        link = self.slowest_link(stage.devices, size * RING_TOKENS / stage.tp)
        one = Ring(stage.tp, 1, size, link).token_seconds(1 / link.bytes_per_s)
        pieces = PIECES if stage.kind.sums_in_pieces else 1
        before: tuple[Counter[float], Counter[float]] = (Counter(), Counter())
        hidden = 0.0
        for piece in blocks:
            # Benchmarks price fractions of a sum
            before[0].update(piece.before_sums[: int(piece.reduced[0])])
        for piece in learning:
            backward_s = piece.before_sums[int(piece.reduced[0]) :]
            before[1].update(backward_s)
            for product_s, during_s in zip_longest(backward_s, piece.during_sums, fillvalue=0.0):
                hidden += min(one - min(one, product_s) * (1 - 1 / pieces), during_s)
        # Only sums in pieces overlap with the product before them.
        ahead, back = (tuple((n, s) for s, n in each.items()) if pieces > 1 else () for each in before)
        return (
            Ring(stage.tp, forward, size, link, pieces=pieces, beside=ahead),
            Ring(stage.tp, backward, size, link, hidden, pieces, back),
        )

    def hop(self, stage: Stage, other: Stage) -> NeighborMessages:
        senders = stage.devices
        receivers = other.devices
        # Sender i modulo the number of senders sends to receiver i (passes/pipeline.py).
        pairs = list(zip(senders, receivers, strict=False))
        by_sender = [[self.link(a, b) for b in receivers[i :: len(senders)]] for i, (a, _) in enumerate(pairs)]
        links = max(by_sender, key=lambda each: sum(link.seconds(MESSAGE_BYTES) for link in each))
        uses = Counter(resource for pair in pairs for resource in self.cluster.resources(*pair))
        return NeighborMessages(
            tuple(links), self.sizes.hidden_bytes, max(uses.values()), self.transfer_factors[TimeKind.P2P]
        )

    def question(self, strategies: Sequence[Strategy], home: Home, room: Sequence[float] | None = None) -> HomeQuestion:
        return HomeQuestion(
            self.outline,
            self.buckets,
            tuple(strategies),
            self.cluster,
            home,
            self.sizes.itemsize,
            health=self.health,
            room=None if room is None else tuple(room),
            push_itemsize=self.push_itemsize,
        )


def micro_batches_of(strategy: Strategy, assignment: Assignment) -> list[list[MicroBatch]]:
    """Return packed micro-batches, padded for sequence parallelism."""
    by_pipeline = []
    for pipeline, batches in zip(strategy.pipelines, assignment.tokens, strict=True):
        parts = math.lcm(*(s.tp for s in pipeline.stages if s.kind.sequence_parallel), 1)
        packed = []
        for lengths in batches:
            # A separate sequence
            padding = -sum(lengths) % parts
            packed.append(MicroBatch(sum(lengths) + padding, len(lengths) + bool(padding)))
        by_pipeline.append(packed)
    return by_pipeline

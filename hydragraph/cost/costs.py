"""Costs: the single source for the time and memory of a strategy, for planning, simulation, comparison and reports.

    profile   time and memory of blocks, by type of device          -> `pipeline`, `work`, `memory`
    cluster   the type of each rank, and the links                  -> messages, tensor-parallel sums, pull and push
    health    the slowdown of each rank                             -> every computation of its stage, its part of a
                                                                       message (latency), commit and update

The seconds of a strategy are those of its slowest pipeline (`PipelineCost.seconds`, the exact recurrence) plus those of
pulling weights, pushing gradients, agreeing and updating (`fixed`). The simulator uses the same `work`.

Formulas of the papers -> functions:

    AutoHet, T* = max_j { sum_i t_i^j + (K - 1) max_c t_c^j } + T_sync  `Costs.seconds`: the recurrence itself, `fixed`
    Malleus, y = rho_k max x_g: a stage is as slow as its slowest rank   `Costs.stages`; x_g is `Costs.rate`
    Malleus, l mu + nu <= C: what fits                                   `Costs.max_len`, by walking memory: `Reach`
    Hydraulis, section 5.2, mutual slices of pull and push               `CostedWork.moved`
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from hydragraph.cost.accounts import Kind
from hydragraph.cost.actors import stage_actors
from hydragraph.cost.block_pieces import AUX, Piece
from hydragraph.cost.chosen_home import question_of
from hydragraph.cost.corrections import Corrections, corrected
from hydragraph.cost.curves import Constants, Curve, Table
from hydragraph.cost.deepspeed_stack import Stack
from hydragraph.cost.exchanges import elements_sent, transfers
from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
from hydragraph.cost.home_choice import choose_home
from hydragraph.cost.instruction_work import NOTHING, Priced, Without, Work
from hydragraph.cost.longest_micro_batch import Reach
from hydragraph.cost.measured_profile import PipelineCost, Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.partial_recomputation import within_budget
from hydragraph.cost.rank_memory import STATE_BYTES, Memory, MemoryCurve, PricedBlocks, Walk, exchange_name
from hydragraph.cost.shared_stage_costs import turns
from hydragraph.cost.stage_costs import Hop, Ring, StageCost, stages_end
from hydragraph.cost.timeline import SimulatedSpan, Timeline, run
from hydragraph.cost.traffic import Transfers
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES, WEIGHT_BYTES
from hydragraph.errors import Unsupported
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.layout import Layout
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.value import bucket_of
from hydragraph.passes.place import Placement, place
from hydragraph.passes.stream import turns as exchanges
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Interconnect
from hydragraph.spec.health import Health
from hydragraph.spec.home import AUTO, Home
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Pipeline, Stage, Strategy
from hydragraph.spec.strategy_text import DEFAULT_SCHEDULE

OWN = Stack()
# Micro-batches per stage of the iteration that `fixed` simulates: enough to hide traffic.
FILLED = 2


class Costs:
    """Costs of strategies on a cluster.

    Args:
        profile: of the model, for every type of device of the cluster.
        cluster: one device per rank.
        health: rates of ranks; None: the rates of the corrections; without corrections, all ranks are healthy.
        home: owners of weights and optimizer state. If it has a rule, its owners are chosen for the priced strategy, as
            a run of it does (`of_strategies`); None: the rule "auto". Without nodes of its own, copies use the nodes of
            the cluster.
        blocks: exact memory of compiled graphs; None: the profile's lines.
        stack: the runtime; one other than hydragraph's own is priced by `seconds` only, and has no simulation.
        state_bytes: per trained element at home: its weight and optimizer state.
        push_itemsize: bytes of an element of a gradient as it travels to its owner.
        corrections: results of runs priced with these costs (`hydragraph compare`); they correct all seconds.

    Raises:
        Unsupported: the profile does not cover a type of the cluster, or knows no blocks.
        ValueError: the home or the health is for other ranks.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        health: Health | None = None,
        *,
        home: Home | None = None,
        blocks: PricedBlocks | None = None,
        stack: Stack = OWN,
        state_bytes: int = STATE_BYTES,
        corrections: Corrections | None = None,
        push_itemsize: int = GRADIENT_BYTES,
    ) -> None:
        self.stack = stack
        self.push_itemsize = push_itemsize
        self.state_bytes = state_bytes
        self.profile = profile
        self.cluster = cluster
        self.corrections = corrections or Corrections()
        self.health = self.corrections.health if health is None else health
        # Correction factors of transfers, looked up once because transfers are many.
        self._transfers = {kind: self.corrections.factor(kind) for kind in (Kind.PULL, Kind.PUSH, Kind.P2P)}
        self.home = AUTO if home is None else home
        for rank in self.health:
            if rank >= len(cluster.devices):
                raise ValueError(f"health names rank {rank}: the cluster has {len(cluster.devices)} devices (from 0)")
        if not profile.blocks or profile.model_sizes is None:
            raise Unsupported(
                "it has constants of whole schemes only, not of blocks",
                where=f"profile {profile.name}",
                remedy="measure the model with hydragraph profile, or price it from a datasheet (hydragraph simulate)",
            )
        self._of_type = {name: corrected(profile.of(name), self.corrections, name) for name in cluster.types}
        self.sizes: ModelSizes = profile.model_sizes
        self.outline: Outline = self.sizes.outline()
        self.buckets: tuple[Bucket, ...] = self.sizes.buckets()
        self._given_blocks = blocks
        self.blocks: PricedBlocks = blocks or ProfileBlocks(self)
        self.home.check(self.ranks, [bucket.name for bucket in self.buckets])
        placed = self.home.without_rule.on([device.node for device in cluster.devices])
        self._owners = HomeLayouts(placed, self.ranks)
        self._chosen: dict[tuple[Strategy, ...], Costs] = {}
        self._reach = Reach(self)
        self._budgets: dict[tuple[str, StageKind], Mapping[str, Piece]] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.cluster.devices)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles of all types of device of the cluster."""
        return tuple(self._of_type.values())

    @property
    def measured(self) -> bool:
        """Whether computation was measured, rather than derived from a datasheet."""
        return all(profile.efficiency is None for profile in self._of_type.values())

    @property
    def source(self) -> str:
        """The source of the seconds of computation, as a sentence."""
        names = ", ".join(profile.name for profile in self._of_type.values())
        if not self.measured:
            names = "; ".join([names, *dict.fromkeys(note for p in self._of_type.values() for note in p.notes)])
        by = f"; corrected: {self.corrections}" if self.corrections.types else ""
        return f"computation {'as measured' if self.measured else 'is not measured'}: {names}{by}"

    def changed(
        self,
        *,
        profile: Profile | None = None,
        cluster: Cluster | None = None,
        health: Health | None = None,
        home: Home | None = None,
        corrections: Corrections | None = None,
    ) -> Costs:
        """Return the costs with another profile, cluster, health, home or corrections."""
        costs = Costs(
            profile or self.profile,
            cluster or self.cluster,
            self.health if health is None else health,
            home=self.home if home is None else home,
            blocks=self._given_blocks,
            stack=self.stack,
            state_bytes=self.state_bytes,
            corrections=self.corrections if corrections is None else corrections,
            push_itemsize=self.push_itemsize,
        )
        alike = costs.ranks == self.ranks and tuple(costs.cluster.types) == tuple(self.cluster.types)
        if costs.profile is self.profile and alike:
            costs._reach = Reach(costs, self._reach)
        return costs

    def of_ranks(self, ranks: Sequence[int], home: Home) -> Costs:
        """Return the costs on some of these ranks, renumbered in this order, under a home."""
        return self.changed(cluster=self.cluster.of_ranks(ranks), health=self.health.of_ranks(ranks), home=home)

    def reordered(self, ranks: Sequence[int]) -> Costs:
        """Return the costs on the same ranks, renumbered in this order."""
        cluster = self.cluster.reordered(ranks)
        return self.changed(cluster=cluster, health=self.health.of_ranks(ranks), home=self.home.reordered(ranks))

    def of_strategies(self, *strategies: Strategy, tokens: int | None = None) -> Costs:
        """Return the costs under the home chosen for some strategies together; unchanged if their home has no rule.

        Args:
            tokens: of the largest micro-batch, which limits the memory for state; default: as many as use a device
                well.
        """
        if self.home.rule is None:
            return self
        if strategies not in self._chosen or tokens is not None:
            for strategy in strategies:
                strategy.check(self.outline.layers, self.ranks, self.sizes.heads)
            home = choose_home(question_of(self, strategies, tokens=tokens))
            self._chosen[strategies] = self.changed(home=home)
        return self._chosen[strategies]

    # Pipelines.

    def pipeline(self, pipeline: Pipeline, schedule: str = DEFAULT_SCHEDULE, limit: int | None = None) -> PipelineCost:
        """Return the cost of a pipeline: constants of its slowest stage for search, and its stages for exact seconds.

        Args:
            limit: maximum number of tokens of its micro-batches; None: as many as fit.

        Raises:
            Unsupported: a stage is of a kind that was not measured, or has a lost rank.
            ValueError: its number of layers differs from the model's.
        """
        if pipeline.layers != self.outline.layers:
            raise ValueError(
                f"profile {self.profile.name}: a pipeline of {pipeline.layers} layers, but it was measured on a model "
                f"of {self.outline.layers}: measure this model with hydragraph profile"
            )
        limit = self.max_len(pipeline) if limit is None else limit
        return self._pipeline(pipeline, self.stages(pipeline), limit, schedule)

    def pipelines(self, strategy: Strategy) -> tuple[PipelineCost, ...]:
        """Return the cost of each pipeline of a strategy.

        A stage shared by several pipelines is priced as slower for each of them, according to their paces
        (`cost.shared_stage_costs`). Its micro-batches may have as many tokens as fit when all of its pipelines have
        their maximum in flight.

        Raises:
            Unsupported, ValueError: as for `pipeline`.
        """
        if self.home.rule is not None:
            return self.of_strategies(strategy).pipelines(strategy)
        alone = tuple(self.pipeline(p, strategy.schedule) for p in strategy.pipelines)
        if not strategy.shares:
            return alone
        paces = [p.envelope.work(p.util_len) + p.c for p in alone]
        limits = [self.max_len(p, strategy) for p in strategy.pipelines]
        stages = [
            [cost.slower(factor) for cost, factor in zip(p.parts, factors, strict=True)]
            for p, factors in zip(alone, turns(strategy, paces), strict=True)
        ]
        every = zip(strategy.pipelines, stages, limits, strict=True)
        return tuple(self._pipeline(p, parts, limit, strategy.schedule) for p, parts, limit in every)

    def _pipeline(self, pipeline: Pipeline, stages: Sequence[StageCost], limit: int, schedule: str) -> PipelineCost:
        util = max(self.piece_profile(rank).util.get(s.tp, 1) for s in pipeline.stages for rank in s.devices)
        # The slowest stage may depend on the length. Search uses one set of constants, taken at a useful length.
        rows = pipeline.rows
        each = [
            [s.constants for s, there in zip(stages, rows, strict=True) if there == row] for row in dict.fromkeys(rows)
        ]
        of_rows = [row[0] if len(row) == 1 else Constants.sum((1.0, k) for k in row) for row in each]
        slowest = max(of_rows, key=lambda k: k.work(util) + k.c)
        self._check_fit(stages, slowest)
        return PipelineCost(
            slowest.a,
            slowest.b,
            slowest.c,
            len(of_rows),
            limit,
            min(util, max(limit, 1)),
            len(pipeline.devices),
            tuple(stages),
            schedule,
            slowest.near,
            rows if pipeline.interleaved else (),
        )

    def _check_fit(self, stages: Sequence[StageCost], slowest: Constants) -> None:
        """Reject constants fitted to noise: real attention never has a = 0, and a real stage never b = 0."""
        curves = [curve for stage in stages for parts in (*stage.forward, *stage.backward) for _, curve in parts]
        if self.measured and slowest.failed and not any(isinstance(curve, Table) for curve in curves):
            raise Unsupported(
                f"a stage's fit failed (a = {slowest.a:g}, b = {slowest.b:g}, c = {slowest.c:g})",
                where=f"profile {self.profile.name}",
                remedy="measure it again, on a quieter machine or with longer sequences: hydragraph profile --longest",
            )

    def stages(self, pipeline: Pipeline) -> tuple[StageCost, ...]:
        """Return the time of each stage of a pipeline for a micro-batch."""
        costs = []
        first = 0
        for i, stage in enumerate(pipeline.stages):
            span = self.outline.span(first, first + stage.layers)
            first += stage.layers
            following = pipeline.stages[i + 1] if i + 1 < len(pipeline.stages) else None
            cost = self.stage(stage, span, following)
            # Devices of interleaved stages compute auxiliary values once for each micro-batch.
            costs.append(replace(cost, aux=()) if pipeline.rows[i] in pipeline.rows[:i] else cost)
        return tuple(costs)

    def stage(self, stage: Stage, span: tuple[int, int], following: Stage | None = None) -> StageCost:
        """Return the time of the blocks in a span [first, last) of positions on a stage's ranks."""
        kind = stage.kind
        # A stage is as slow as its slowest rank; ranks of the same type and rate are alike, so each such pair counts
        # once.
        forwards = []
        backwards = []
        aux = []
        for name, rate in dict.fromkeys((self.cluster.type_of(r), self.rate(r)) for r in stage.devices):
            pieces = self.pieces(name, kind)
            templates = self.profile.blocks[slice(*span)]
            counts = {t: templates.count(t) for t in dict.fromkeys(templates)}
            curves = {t: pieces[t].parts(kind.recompute) for t in counts}
            forward: list[tuple[float, Curve]] = [(rate * n, curves[t][0]) for t, n in counts.items()]
            aux.append(((rate, _aux(pieces[AUX])),) if AUX in pieces else ())
            forwards.append(tuple(forward))
            backwards.append(tuple((rate * n, curves[t][1]) for t, n in counts.items() if self._learns(t)))
        hops: tuple[Hop | None, Hop | None] = (None, None)
        if following is not None:
            hops = self._hop(stage, following), self._hop(following, stage)
        return StageCost(tuple(forwards), tuple(backwards), tuple(aux), self._rings(stage, kind, span), *hops)

    def _learns(self, template: str) -> bool:
        """Return whether any block of a template runs a backward: blocks below the lowest trained one do not."""
        lowest = self.outline.lowest
        return template in self.profile.blocks[lowest:]

    def _summed(self, stage: Stage, kind: StageKind, span: tuple[int, int]) -> tuple[int, int]:
        """Return how many hidden states a stage's ranks sum in forward and backward, if curves exclude these sums."""
        pieces = self.pieces(self.cluster.type_of(stage.devices[0]), kind)
        counts = [pieces[t].reduced for t in self.profile.blocks[slice(*span)]]
        return sum(forward for forward, _ in counts), sum(backward for _, backward in counts)

    def _rings(self, stage: Stage, kind: StageKind, span: tuple[int, int]) -> tuple[Ring, Ring] | None:
        if stage.tp == 1:
            return None
        times = self._summed(stage, kind, span)
        if not any(times):
            return None
        # A ring is as slow as its slowest link; which one that is may depend on the size, so a typical message is used.
        around = zip(stage.devices, (*stage.devices[1:], stage.devices[0]), strict=True)
        part = self.sizes.hidden_bytes * 2048 / stage.tp
        link = max((self.link(a, b) for a, b in around), key=lambda each: each.seconds(part))
        one, two = (Ring(stage.tp, n, self.sizes.hidden_bytes, link) for n in times)
        return one, two

    def _hop(self, stage: Stage, other: Stage) -> Hop:
        senders = stage.devices
        receivers = other.devices
        # Receiver i gets from sender i modulo their number (passes/pipeline.py), so a rank may send several messages.
        pairs = list(zip(senders, receivers, strict=False))
        by_sender = [[self.link(a, b) for b in receivers[i :: len(senders)]] for i, (a, _) in enumerate(pairs)]
        links = max(by_sender, key=lambda each: sum(link.seconds(1 << 20) for link in each))
        uses: dict[object, int] = {}
        # Ranks that share a network card share its bandwidth.
        for a, b in pairs:
            for resource in self.cluster.resources(a, b):
                uses[resource] = uses.get(resource, 0) + 1
        part = 1 / stage.tp if self.stack.parts else 1.0
        part *= self._transfers[Kind.P2P]
        gathering = None
        if self.stack.parts and other.tp > 1:
            around = zip(receivers, (*receivers[1:], receivers[0]), strict=True)
            slowest = max((self.link(a, b) for a, b in around), key=lambda each: each.seconds(1 << 20))
            gathering = other.tp, slowest
        return Hop(
            tuple(links),
            self.sizes.hidden_bytes,
            max(uses.values()),
            part,
            self.stack.blocking,
            self.stack.buffer_bytes,
            gathering,
            self.stack.staging,
        )

    def max_len(self, pipeline: Pipeline, strategy: Strategy | None = None, beside: float = 0.0) -> int:
        """Return the maximum number of tokens of a pipeline's micro-batch, given the memory of each rank.

        The default schedule determines how many micro-batches are in flight.

        Args:
            strategy: the pipeline's strategy if it shares stages with other pipelines, whose micro-batches are then
                assumed to be as long; None: it shares none.
            beside: additional bytes that every rank must have free.
        """
        return self._reach.max_len(pipeline, strategy, beside)

    def beside(self, strategy: Strategy, tokens: Sequence[int]) -> list[float]:
        """Return the bytes that each rank needs in addition to its state, from the peaks that `max_len` uses.

        Args:
            tokens: of the longest micro-batch of each pipeline.
        """
        return self._reach.beside(strategy, tokens)

    def owned_bytes(self, rank: int) -> int:
        """Return the constant bytes of a rank's shard: weights, optimizer state and gradients."""
        learning = self.owned(rank, True)
        return (self.state_bytes + GRADIENT_BYTES) * learning + WEIGHT_BYTES * self.owned(rank, False)

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

    @cached_property
    def _owned(self) -> dict[tuple[int, bool | None], int]:
        return {}

    def memory_of(self, rank: int) -> float:
        """Return the bytes that a rank may use: the measured free memory, else the device's size."""
        device = self.piece_profile(rank).device
        size = float(self.cluster.devices[rank].memory_bytes)
        return min(size, device.memory) if device is not None and self.measured else size

    # Costs of pieces.

    def rate(self, rank: int) -> float:
        """Return a rank's rate.

        Raises:
            Unsupported: the rank is lost.
        """
        rate = self.health.rate(rank)
        if math.isinf(rate):
            raise Unsupported(
                f"rank {rank} is lost", where="costs", remedy="give a strategy that does not name it, or another health"
            )
        return rate

    def link(self, a: int, b: int) -> Interconnect:
        """Return the link between two ranks of a stage or of neighbouring ones; a slow rank adds to its latency."""
        return self.cluster.link(a, b).handled(max(self.rate(a), self.rate(b)))

    def piece_profile(self, rank: int) -> Profile:
        """Return the profile of a rank's type of device."""
        return self._of_type[self.cluster.type_of(rank)]

    def pieces(self, type_: str, kind: StageKind) -> Mapping[str, Piece]:
        """Return the cost of every template in a kind of stage on a type of device.

        Raises:
            Unsupported: the kind was not measured, or its fit failed.
        """
        profile = self._of_type[type_]
        if kind not in profile.pieces and not isinstance(kind.recompute, bool):
            return self._within_budget(type_, kind)
        if kind not in profile.pieces:
            why = profile.unfit.get(kind, "they were not measured")
            flags = " --sequence-parallel" * kind.sequence_parallel + " --recompute" * bool(kind.recompute)
            where = f" on device type {type_}" if type_ else ""
            raise Unsupported(
                f"stages of kind {kind.text}{where}: {why}",
                where=f"profile {profile.name}",
                remedy=f"measure it: hydragraph profile --schemes tp{kind.tp}pp1{flags}",
            )
        return profile.pieces[kind]

    def _within_budget(self, type_: str, kind: StageKind) -> Mapping[str, Piece]:
        """Return the costs of stages that recompute within a memory budget; see `cost.partial_recomputation`."""
        if (type_, kind) not in self._budgets:
            plain, full = (self.pieces(type_, kind._replace(recompute=again)) for again in (False, True))
            blocks = dict(zip(self.profile.blocks, self.outline.blocks, strict=True))
            shares = {template: self.blocks.repeated(block, kind) for template, block in blocks.items()}
            self._budgets[type_, kind] = within_budget(plain, full, kind.recompute, shares)
        return self._budgets[type_, kind]

    # Strategies.

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

    def seconds(self, strategy: Strategy, assignment: Assignment) -> float:
        """Return the seconds of an iteration: its slowest pipeline, plus `fixed`; simulated if a stage streams."""
        if strategy.streams and self.stack.own:
            return self.simulate(strategy, assignment).seconds
        return self.pipelines_end(strategy, assignment) + self.fixed(strategy)

    def pipelines_end(self, strategy: Strategy, assignment: Assignment) -> float:
        """Return when the slowest pipeline of an iteration ends, without `fixed`.

        Pipelines that share stages wait for each other, so their computation is simulated.

        Raises:
            Unsupported: pipelines share stages or have interleaved ones, and the stack is another runtime's.
        """
        if (strategy.shares or strategy.interleaved) and not self.stack.own:
            raise Unsupported(
                f"shared or interleaved stages on another runtime ({self.stack}), which has no such order",
                where=f"strategy {strategy}",
                remedy="price it with costs of hydragraph's own stack",
            )
        if strategy.shares:
            work = Without(self.work(strategy, assignment), "pull", "push", "ending")
            return self._timeline(strategy, assignment.counts, work).seconds
        tokens = assignment.tokens
        ends = [
            stages_end(self.stages(p), batches, strategy.schedule, p.rows)
            for p, batches in zip(strategy.pipelines, tokens, strict=True)
            if batches
        ]
        return max(ends, default=0.0)

    def fixed(self, strategy: Strategy) -> float:
        """Return the seconds that pull, push, commit and update add to a strategy's iterations.

        They are the extra time of a simulated iteration: each pipeline runs two micro-batches per stage, with as many
            tokens as
        use a device well, and part of the traffic is hidden behind their computation.
        """
        if self.home.rule is not None and self.stack.own:
            return self.of_strategies(strategy).fixed(strategy)
        key = (strategy.pipelines, strategy.schedule)
        if key not in self._fixed and self.stack.all_reduce:
            self._fixed[key] = self._all_reduced(strategy)
        if key not in self._fixed:
            counts = [FILLED * len(p.stages) for p in strategy.pipelines]
            tokens = [
                max(self.piece_profile(r).util.get(s.tp, 1) for s in p.stages for r in s.devices)
                for p in strategy.pipelines
            ]
            work = self.work(strategy, Assignment.even(counts, [max(256, n) for n in tokens]))
            # Traffic is hidden in part, so its times do not simply add up: the iteration is simulated with and without
            # it.
            whole = self._timeline(strategy, counts, work).seconds
            self._fixed[key] = max(
                0.0, whole - self._timeline(strategy, counts, Without(work, "pull", "push", "ending")).seconds
            )
        return self._fixed[key]

    def _all_reduced(self, strategy: Strategy) -> float:
        """Return the seconds of a ring over the replicas of every block and the update of a whole stage, at the end.

        A ring of d replicas moves 2 (d - 1) / d of the gradients through each of them; ranks that share a network card
        share its bandwidth.
        """
        # Other runtimes keep the state with the replicas: instead of pull and push, an all-reduce after the last
        # backward.
        worst = 0.0
        places = [self._blocks_of(p) for p in strategy.pipelines]
        for pipeline, mine in zip(strategy.pipelines, places, strict=True):
            for stage, span in zip(pipeline.stages, mine, strict=True):
                pieces = self.pieces(self.cluster.type_of(stage.devices[0]), stage.kind)
                elements = sum(pieces[t].parameters - pieces[t].frozen for t in self.profile.blocks[slice(*span)])
                update = max(self._update_s(rank, elements) for rank in stage.devices)
                others = [
                    s
                    for p, at in zip(strategy.pipelines, places, strict=True)
                    if p is not pipeline
                    for s, there in zip(p.stages, at, strict=True)
                    if there[0] < span[1] and span[0] < there[1]
                ]
                ring = 0.0
                if others:
                    replicas = len(strategy.pipelines)
                    size = 2 * (replicas - 1) / replicas * elements * GRADIENT_BYTES
                    for other in others:  # a ring is as slow as its slowest link
                        hop = self._hop(stage, other)
                        for link in hop.links:
                            ring = max(ring, link.latency_s + hop.sharing * size / link.bytes_per_s)
                worst = max(worst, ring + update)
        return worst

    def _blocks_of(self, pipeline: Pipeline) -> list[tuple[int, int]]:
        spans = []
        first = 0
        for stage in pipeline.stages:
            spans.append(self.outline.span(first, first + stage.layers))
            first += stage.layers
        return spans

    def _update_s(self, rank: int, elements: int) -> float:
        update = self.piece_profile(rank).update
        return self.rate(rank) * (update[0] + update[1] * elements) if update is not None else 0.0

    @cached_property
    def _fixed(self) -> dict[object, float]:
        return {}

    def _timeline(
        self,
        strategy: Strategy,
        counts: Sequence[int],
        work: Priced,
        curves: Callable[[Timeline], Sequence[MemoryCurve]] | None = None,
    ) -> Timeline:
        return run(stage_actors(self.outline, strategy, counts, self.ranks), self.cluster, work, curves)

    def simulate(self, strategy: Strategy, assignment: Assignment) -> Timeline:
        """Simulate one iteration, like `hg.simulate`."""
        if self.home.rule is not None:
            return self.of_strategies(strategy).simulate(strategy, assignment)
        work = self.work(strategy, assignment)

        def curves(timeline: Timeline) -> Sequence[MemoryCurve]:
            return _Curves(self, strategy, assignment, timeline)

        return self._timeline(strategy, assignment.counts, work, curves)

    def work(self, strategy: Strategy, assignment: Assignment) -> CostedWork:
        """Return the cost of each instruction of an iteration.

        Raises:
            ValueError: strategy, assignment and cluster do not fit one another.
            Unsupported: a cost was not measured, or a rank is lost.
        """
        if not self.stack.own:
            raise Unsupported(
                f"the instructions of another runtime ({self.stack})",
                where="costs",
                remedy="use costs.seconds(strategy, assignment), or costs of hydragraph's own stack",
            )
        strategy.check(self.outline.layers, self.ranks, self.sizes.heads)
        return CostedWork(self.of_strategies(strategy), strategy, assignment)

    def memory(self, strategy: Strategy, assignment: Assignment | None = None) -> tuple[Memory, ...]:
        """Return the peak memory of every rank, assuming that every exchange takes as long as it may.

        Only a simulation knows when exchanges end: `hg.simulate(...).memory` gives a tighter bound.

        Args:
            assignment: of an iteration; default: two micro-batches per stage, of as many tokens as use a device well.
        """
        if assignment is None:
            counts = [FILLED * len(p.stages) for p in strategy.pipelines]
            tokens = [
                max(self.piece_profile(r).util.get(s.tp, 1) for s in p.stages for r in s.devices)
                for p in strategy.pipelines
            ]
            assignment = Assignment.even(counts, tokens)
        return tuple(walk.peak() for walk in self.walks(strategy, assignment))

    def walks(self, strategy: Strategy, assignment: Assignment) -> list[Walk]:
        """Return the walk through every rank's program."""
        if self.home.rule is not None:
            return self.of_strategies(strategy).walks(strategy, assignment)
        batches = micro_batches_of(strategy, assignment)
        return [self.walk(strategy, batches, rank) for rank in range(self.ranks)]

    def walk(
        self,
        strategy: Strategy,
        batches: Sequence[Sequence[MicroBatch]],
        rank: int,
        messages: bool = True,
        over: Mapping[int, Sequence[str]] | None = None,
    ) -> Walk:
        """Return the walk through one rank's program; arguments as for `cost.memory.Walk`."""
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


def _aux(piece: Piece) -> Curve:
    """Return the cost of auxiliary values, which have no backward."""
    return piece.forward if piece.forward is not None else piece.seconds


class CostedWork:
    """Cost of every instruction of one iteration; see `cost.instruction_work.Priced`."""

    def __init__(self, costs: Costs, strategy: Strategy, assignment: Assignment) -> None:
        self._costs = costs
        tokens = assignment.tokens
        if len(tokens) != len(strategy.pipelines):
            raise ValueError(
                f"the assignment has {len(tokens)} pipelines, the strategy {len(strategy.pipelines)}: give one list of "
                "micro-batches for each"
            )
        self._lengths = tokens
        self._strategy = strategy
        self._packed = [[m.tokens for m in batches] for batches in micro_batches_of(strategy, assignment)]
        self._placement: Placement = place(costs.outline, strategy, assignment.counts)
        self._users = {(turn.op, turn.name): turn.stages for turn in exchanges(self._placement, "train")}
        self._last = {bucket_of(name): name for op, name in self._users if op is Op.PUSH}
        self._where = {stage.ranks[0]: stage for stage in self._placement.stages}
        self._buckets = {b.name: b for b in costs.buckets}
        self._templates = dict(zip(costs.outline.blocks, costs.profile.blocks, strict=True))
        self._known: dict[object, float] = {}
        self._computed: dict[object, list[float]] = {}
        self._moved: dict[object, Transfers] = {}

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """See `Priced`; blocks of one template take equally long."""
        template = AUX if block == "aux" else self._templates[block]
        key = (op, template, tuple(ranks), tuple(micro_batches))
        if key not in self._computed:
            self._computed[key] = self._computing(op, block, template, ranks, micro_batches)
        return self._computed[key]

    def _computing(
        self, op: Op, block: str, template: str, ranks: Sequence[int], micro_batches: Sequence[int]
    ) -> list[float]:
        stage = self._where[ranks[0]]
        kind = stage.kind
        costs = self._costs
        kinds = dict.fromkeys((costs.cluster.type_of(r), costs.rate(r)) for r in ranks)
        lengths = {
            m: batch for r in stage.roles for m, batch in zip(r.micro_batches, self._lengths[r.pipeline], strict=True)
        }
        batches = [lengths[m] for m in micro_batches]
        seconds = [0.0] * len(batches)
        for name, rate in kinds:
            for i, batch in enumerate(batches):
                seconds[i] = max(seconds[i], rate * self._seconds(name, kind, template, op, batch))
        # Measurements include tensor-parallel sums; a datasheet's operations do not, so rings are added.
        if len(ranks) > 1 and block != "aux":
            at = costs.outline.index[block]
            role = stage.roles[0]
            rings = costs._rings(self._strategy.pipelines[role.pipeline].stages[role.stage], kind, (at, at + 1))
            if rings is not None:
                ring = rings[op is Op.BACKWARD]
                seconds = [alone + ring.seconds(sum(m)) for alone, m in zip(seconds, batches, strict=True)]
        return seconds

    def _seconds(self, type_: str, kind: StageKind, template: str, op: Op, lengths: tuple[int, ...]) -> float:
        key = (type_, kind, template, op, lengths)
        if key not in self._known:
            pieces = self._costs.pieces(type_, kind)
            if template == AUX:
                curve = _aux(pieces[AUX]) if AUX in pieces else None
            else:
                curve = pieces[template].parts(kind.recompute)[op is Op.BACKWARD]
            self._known[key] = curve.seconds(lengths) if curve is not None else 0.0
        return self._known[key]

    def moved(self, op: Op, bucket: str) -> Transfers:
        """See `Priced`; equal buckets held by the same stages get the same object."""
        stages = self._users.get((op, bucket), ())
        weights = self._buckets[bucket_of(bucket)]
        if op is Op.PUSH and not weights.learns:
            return NOTHING
        owners = self._costs.home_of(weights)
        key = (op, weights.form, owners, stages)
        if key not in self._moved:
            costs = self._costs
            pulls = op is Op.PULL
            size = costs.sizes.itemsize if pulls else costs.push_itemsize
            sent = elements_sent(op, weights, owners, stages, self._splits_tokens(stages), costs.ranks)
            factor = costs._transfers[Kind.PULL if pulls else Kind.PUSH]
            self._moved[key] = transfers(sent, size * factor, costs.cluster)
        return self._moved[key]

    def handed_on(self, bucket: str) -> Transfers:
        """See `Priced`; buckets with the same home get the same object."""
        costs = self._costs
        weights = self._buckets[bucket_of(bucket)]
        # A bucket's streamed pushes are added at home, and only the last one hands the sums on.
        if costs.home.copies == 1 or not weights.learns or self._last.get(weights.name, bucket) != bucket:
            return NOTHING
        owners = costs.home_of(weights)
        if owners not in self._moved:
            from hydragraph.ir.link_volume import handed_on

            factor = costs._transfers[Kind.PUSH]
            self._moved[owners] = transfers(handed_on(owners, costs.ranks), GRADIENT_BYTES * factor, costs.cluster)
        return self._moved[owners]

    def _splits_tokens(self, stages: Sequence[tuple[int, ...]]) -> bool:
        return any(self._where[ranks[0]].kind.sequence_parallel for ranks in stages)

    def message_bytes(self, pipeline: int, micro_batch: int) -> float:
        """See `Priced`."""
        factor = self._costs._transfers[Kind.P2P]
        return factor * self._packed[pipeline][micro_batch] * self._costs.sizes.hidden_bytes

    def ring_bytes(self) -> dict[tuple[int, int], float]:
        """Return what each rank sends to the next one of its stage in an iteration's tensor-parallel sums.

        A sum by a ring sends 2 (t - 1) / t hidden states from each of t ranks. Measured curves include an unknown
        number of sums, which are not counted here.
        """
        costs = self._costs
        pairs: dict[tuple[int, int], float] = {}
        for placed in self._placement.stages:
            t = len(placed.ranks)
            summed = 0  # tokens
            for role in placed.roles if t > 1 else ():
                stage = self._strategy.pipelines[role.pipeline].stages[role.stage]
                sums = sum(costs._summed(stage, placed.kind, placed.blocks[role.visit]))
                summed += sums * sum(self._packed[role.pipeline])
            for rank, other in zip(placed.ranks, (*placed.ranks[1:], placed.ranks[0]), strict=True):
                if summed:
                    pairs[rank, other] = summed * 2 * (t - 1) / t * costs.sizes.hidden_bytes
        return pairs

    def update_s(self, rank: int) -> float:
        """See `Priced`."""
        costs = self._costs
        update = costs.piece_profile(rank).update
        if update is None:
            return 0.0
        rate = costs.health.rate(rank)
        if math.isinf(rate):
            return 0.0
        return rate * (update[0] + update[1] * self._owned(rank))

    def commit_s(self) -> float:
        """See `Priced`."""
        costs = self._costs
        agreeing = max(self.handling(rank) * costs.piece_profile(rank).commit_s for rank in range(costs.ranks))
        return agreeing + max(self._norm_s(rank) for rank in range(costs.ranks))

    def handling(self, rank: int) -> float:
        """See `Priced`; a lost rank counts as healthy, since it takes no part."""
        rate = self._costs.health.rate(rank)
        return rate if math.isfinite(rate) else 1.0

    def _norm_s(self, rank: int) -> float:
        norm = self._costs.piece_profile(rank).norm_s
        rate = self._costs.health.rate(rank)
        # The norm of a rank's shard counts once, not once per copy.
        return rate * norm * self._owned(rank) / self._costs.home.copies if norm and not math.isinf(rate) else 0.0

    def _owned(self, rank: int) -> float:
        """Return how many trained elements a rank owns."""
        key = ("owned", rank)
        if key not in self._known:
            self._known[key] = self._costs.owned(rank, learning=True)
        return self._known[key]

    def as_work(self) -> Work:
        """Return the work in explicit form, for small programs: instruction by instruction, pair by pair."""
        seconds: dict[tuple[Op, str, int] | tuple[Op, str, int, int], float] = {}
        for stage in self._placement.stages:
            for position in stage.positions:
                block = self._costs.outline.blocks[position]
                for op in (Op.FORWARD, Op.BACKWARD):
                    took = self.computing(op, block, stage.ranks, stage.micro_batches)
                    for m, each in zip(stage.micro_batches, took, strict=True):
                        seconds |= {(op, block, rank, m): each for rank in stage.ranks}
        seconds |= {(Op.UPDATE, "", rank): self.update_s(rank) for rank in range(self._costs.ranks)}
        pulls, pushes = (
            {name: dict(self.moved(op, name).pairs) for other, name in self._users if other is op}
            for op in (Op.PULL, Op.PUSH)
        )
        handed = {name: dict(self.handed_on(name).pairs) for name in pushes}
        rates = {rank: self.handling(rank) for rank in range(self._costs.ranks)}
        return Work(seconds, pulls, pushes, {}, self.commit_s(), rates, handed)


class ProfileBlocks:
    """Memory of blocks, from a profile's lines over the tokens; see `cost.memory.Blocks`."""

    def __init__(self, costs: Costs) -> None:
        self.outline = costs.outline
        self.buckets = costs.buckets
        self.itemsize = costs.sizes.itemsize
        self.push_itemsize = costs.push_itemsize
        self.hidden_bytes = costs.sizes.hidden_bytes
        self._templates = dict(zip(costs.outline.blocks, costs.profile.blocks, strict=True))
        self._types = tuple(costs.cluster.types)
        self._profile = costs.profile
        self._pieces = costs.pieces
        by_kind = costs.profile.of(self._types[0]).pieces.values()
        self._aux_bytes = next((pieces[AUX].kept for pieces in by_kind if AUX in pieces), 0.0)

    def _piece(self, template: str, part: StagePart) -> Piece:
        # A block's memory is the same on all types; not every kind of stage was measured on each of them.
        kind = part.kind if isinstance(part.recompute, bool) else part.kind._replace(recompute=True)
        measured = (name for name in self._types if kind in self._profile.of(name).pieces)
        return self._pieces(next(measured, self._types[0]), part.kind)[template]

    def footprint(self, block: str, part: StagePart, batch: MicroBatch) -> Footprint:
        """See `Blocks`."""
        piece = self._piece(self._templates[block], part)
        tokens = batch.tokens
        added = piece.held.added if piece.held else False
        gradients = 0 if added else GRADIENT_BYTES * (piece.parameters - piece.frozen)
        if piece.held is None:  # an older profile has only the sums
            output = 0 if block == self.outline.blocks[-1] else self.hidden_bytes * tokens  # the last is a scalar
            kept = max(0, round(piece.kept * tokens) - output)
            working = round(piece.fixed + piece.working * tokens)
            return Footprint(output, kept, frozenset(), output + kept + working, working, gradients)
        lines = piece.held
        output, saved, forward, backward = (
            max(0, round(fixed + per_token * tokens))
            for fixed, per_token in (lines.output, lines.saved, lines.forward, lines.backward)
        )
        return Footprint(output, saved, frozenset(lines.keeps), forward, backward, gradients)

    def halves(self, block: str, part: StagePart, batch: MicroBatch) -> HalvesFootprint:
        """See `Blocks`; a high estimate, because a profile measures whole backwards."""
        return self.footprint(block, part, batch).halves_estimate

    def adds(self, block: str, part: StagePart) -> bool:
        """See `Blocks`."""
        lines = self._piece(self._templates[block], part).held
        return lines is not None and lines.added

    def repeated(self, block: str, kind: StageKind) -> float:
        """See `PricedBlocks`; a profile has no graphs, so the operations are assumed to follow the memory."""
        return 1.0 - kind.recompute

    def aux_bytes(self, batch: MicroBatch) -> int:
        """See `Blocks`."""
        return round(self._aux_bytes * batch.tokens)


class _Curves(Sequence[MemoryCurve]):
    """Every rank's memory over time, computed on access."""

    def __init__(self, costs: Costs, strategy: Strategy, assignment: Assignment, timeline: Timeline) -> None:
        self._costs = costs
        self._strategy = strategy
        self._timeline = timeline
        self._batches = micro_batches_of(strategy, assignment)

    def __len__(self) -> int:
        return self._costs.ranks

    def __getitem__(self, rank: int) -> MemoryCurve:  # type: ignore[override]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        costs = self._costs
        spans = self._timeline.ranks[rank]
        peak, at, after = costs.walk(self._strategy, self._batches, rank, over=_ended(spans)).curve()
        # One point per change of size; of several changes at the same instant, the last size counts.
        points: list[tuple[float, int]] = []
        now = 0.0
        for span, size in zip(spans, after, strict=True):
            now = max(now, span.start_s if span.instruction.op is not Op.FREE else span.end_s)
            if points and points[-1][0] == now:
                points[-1] = (now, size)
            elif not points or points[-1][1] != size:
                points.append((now, size))
        return MemoryCurve(peak, spans[at].start_s if at >= 0 else 0.0, tuple(points))


def _ended(spans: Sequence[SimulatedSpan]) -> dict[int, list[str]]:
    """Return the exchanges that a rank has ended when it reaches an instruction, in the executor's way.

    Before each computation it ends finished pulls that bring it no data, and before each push, the finished earlier
    ones.
    """
    ended: dict[int, list[str]] = {}
    open_: dict[Op, list[tuple[str, float]]] = {Op.PULL: [], Op.PUSH: []}
    now = 0.0
    for i, span in enumerate(spans):
        instruction = span.instruction
        computes = instruction.op in (Op.FORWARD, Op.BACKWARD)
        if computes:
            now = max(now, span.start_s)
        if computes or instruction.op is Op.PUSH:
            queue = open_[Op.PULL if computes else Op.PUSH]
            while queue and queue[0][1] <= now:
                ended.setdefault(i, []).append(queue.pop(0)[0])
        if instruction.op is Op.PUSH or (instruction.op is Op.PULL and not instruction.writes):
            name = exchange_name(instruction.op, instruction.target)
            open_[instruction.op].append((name, span.end_s))
        if instruction.stream is Stream.COMPUTE:
            now = max(now, span.end_s)
    return ended

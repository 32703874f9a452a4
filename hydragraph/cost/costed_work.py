"""Costs of an iteration's instructions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.block_pieces import AUX, BlockPiece
from hydragraph.cost.curves import ZERO
from hydragraph.cost.exchanges import elements_sent, ring_pairs, transfers
from hydragraph.cost.instruction_work import NOTHING
from hydragraph.cost.pricing import Pricing, micro_batches_of
from hydragraph.cost.traffic import Transfers
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.ir.instruction import Op
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD
from hydragraph.ir.value import bucket_of
from hydragraph.passes.place import place
from hydragraph.passes.stream import turns as exchanges
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy


class CostedWork:
    """Cost of every instruction; see `cost.instruction_work.InstructionCosts`."""

    def __init__(self, costs: Pricing, strategy: Strategy, assignment: Assignment) -> None:
        self._costs = costs
        self._lengths = assignment.tokens
        if len(self._lengths) != len(strategy.pipelines):
            raise ValueError(
                f"the assignment has {len(self._lengths)} pipelines, but the strategy has {len(strategy.pipelines)}: "
                "give one list of micro-batches per pipeline"
            )
        self._strategy = strategy
        self._batches = micro_batches_of(strategy, assignment)
        self.placement = place(costs.outline, strategy, assignment.counts)
        self.users = {(turn.op, turn.name): turn.stages for turn in exchanges(self.placement, "train")}
        self._last = {bucket_of(name): name for op, name in self.users if op is Op.PUSH}
        self._where = {stage.ranks[0]: stage for stage in self.placement.stages}
        self._buckets = {b.name: b for b in costs.buckets}
        self._templates = dict(zip(costs.outline.blocks, costs.profile.blocks, strict=True))
        self._seconds = cache(self._curve_seconds)
        self._computed: dict[object, list[float]] = {}
        self._moved: dict[object, Transfers] = {}

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        template = AUX if block == "aux" else self._templates[block]
        key = (op, template, tuple(ranks), tuple(micro_batches))
        if key not in self._computed:
            self._computed[key] = self._computing(op, block, template, ranks, micro_batches)
        return self._computed[key]

    def _computing(
        self, op: Op, block: str, template: str, ranks: Sequence[int], micro_batches: Sequence[int]
    ) -> list[float]:
        stage = self._where[ranks[0]]
        costs = self._costs
        lengths = {
            m: batch for r in stage.roles for m, batch in zip(r.micro_batches, self._lengths[r.pipeline], strict=True)
        }
        batches = [lengths[m] for m in micro_batches]
        kinds = dict.fromkeys((costs.cluster.type_of(r), costs.rate(r)) for r in ranks)
        seconds = [
            max(rate * self._seconds(name, stage.kind, template, op, batch) for name, rate in kinds)
            for batch in batches
        ]
        # Datasheet times exclude tensor-parallel sums.
        if len(ranks) > 1 and block != "aux":
            at = costs.outline.index[block]
            role = stage.roles[0]
            rings = costs.rings(self._strategy.pipelines[role.pipeline].stages[role.stage], (at, at + 1))
            if rings is not None:
                ring = rings[op is Op.BACKWARD]
                if self._strategy.schedule not in WHOLE_BACKWARD:
                    ring = ring.exposed
                seconds = [alone + ring.seconds(sum(m)) for alone, m in zip(seconds, batches, strict=True)]
        return seconds

    def _curve_seconds(self, type_: str, kind: StageKind, template: str, op: Op, lengths: tuple[int, ...]) -> float:
        # A model may have no auxiliary values.
        piece = self._costs.pieces(type_, kind).get(template, BlockPiece(ZERO, ZERO))
        return (piece.backward if op is Op.BACKWARD else piece.forward).seconds(lengths)

    def copying(self, block: str, ranks: Sequence[int], micro_batch: int) -> float:
        stage = self._where[ranks[0]]
        costs = self._costs
        role = next(role for role in stage.roles if micro_batch in role.micro_batches)
        batch = self._batches[role.pipeline][micro_batch - role.micro_batches.start]
        hidden = batch.tokens * costs.sizes.hidden_bytes // (stage.kind.tp if stage.kind.sequence_parallel else 1)
        moved, _ = costs.blocks.footprint(block, StagePart(stage.kind), batch).offloaded(hidden)
        return moved / min(costs.cluster.devices[rank].host_bytes_per_s for rank in ranks)

    def moved(self, op: Op, bucket: str) -> Transfers:
        costs = self._costs
        stages = self.users.get((op, bucket), ())
        weights = self._buckets[bucket_of(bucket)]
        if op is Op.PUSH and not weights.learns:
            return NOTHING
        owners = costs.home_of(weights)
        key = (op, weights.form, owners, stages)
        if key not in self._moved:
            pulls = op is Op.PULL
            size = costs.sizes.itemsize if pulls else costs.push_itemsize
            splits_tokens = any(self._where[ranks[0]].kind.sequence_parallel for ranks in stages)
            sent = elements_sent(op, weights, owners, stages, splits_tokens, costs.ranks)
            factor = costs.transfer_factors[TimeKind.PULL if pulls else TimeKind.PUSH]
            self._moved[key] = transfers(sent, size * factor, costs.cluster)
        return self._moved[key]

    def handed_on(self, bucket: str) -> Transfers:
        costs = self._costs
        weights = self._buckets[bucket_of(bucket)]
        # A streamed bucket's last push sends the sums to second owners.
        if costs.home.copies == 1 or not weights.learns or self._last.get(weights.name, bucket) != bucket:
            return NOTHING
        owners = costs.home_of(weights)
        if owners not in self._moved:
            from hydragraph.ir.link_volume import handed_on

            size = GRADIENT_BYTES * costs.transfer_factors[TimeKind.PUSH]
            self._moved[owners] = transfers(handed_on(owners, costs.ranks), size, costs.cluster)
        return self._moved[owners]

    def message_bytes(self, pipeline: int, micro_batch: int) -> float:
        factor = self._costs.transfer_factors[TimeKind.P2P]
        return factor * self._batches[pipeline][micro_batch].tokens * self._costs.sizes.hidden_bytes

    def ring_bytes(self) -> dict[tuple[int, int], float]:
        """Return the bytes of the tensor-parallel sums that the curves exclude, by (sender, receiver)."""
        pairs: dict[tuple[int, int], float] = {}
        for placed in self.placement.stages:
            size = 0.0
            for role in placed.roles:
                stage = self._strategy.pipelines[role.pipeline].stages[role.stage]
                rings = self._costs.rings(stage, placed.blocks[role.visit]) or ()
                tokens = sum(m.tokens for m in self._batches[role.pipeline])
                size += sum(ring.sent_bytes(tokens) for ring in rings)
            if size:
                pairs.update(dict.fromkeys(ring_pairs(placed.ranks), size))
        return pairs

    def update_s(self, rank: int) -> float:
        update = self._costs.piece_profile(rank).update
        rate = self._costs.health.rate(rank)
        if update is None or math.isinf(rate):
            return 0.0
        return rate * (update[0] + update[1] * self._costs.owned(rank, learning=True))

    def commit_s(self) -> float:
        costs = self._costs
        agreeing = max(self.handling(rank) * costs.piece_profile(rank).commit_s for rank in range(costs.ranks))
        return agreeing + max(self._norm_s(rank) for rank in range(costs.ranks))

    def _norm_s(self, rank: int) -> float:
        costs = self._costs
        norm = costs.piece_profile(rank).norm_s
        rate = costs.health.rate(rank)
        if not norm or math.isinf(rate):
            return 0.0
        return rate * norm * costs.owned(rank, learning=True) / costs.home.copies

    def handling(self, rank: int) -> float:
        rate = self._costs.health.rate(rank)
        return rate if math.isfinite(rate) else 1.0

"""One rank's program and data for each (strategy, micro-batch counts, purpose)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import Layout, propagation
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.placeholders import DROPOUT_BLOCK
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Purpose, mode_of
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD
from hydragraph.ir.value import Value, bucket_of
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.pipeline import rank_program
from hydragraph.passes.place import PlacedStage, Placement, place
from hydragraph.passes.recently_used import LRU
from hydragraph.passes.split_backward import BackwardPart, split_backward
from hydragraph.passes.stream import Turn, turns
from hydragraph.passes.variants import Variants, local_parameters, vocabulary_starts
from hydragraph.passes.weight_layouts import stage_kinds
from hydragraph.runtime.exchange import Exchange, hand_exchange, pull_exchange, push_exchange
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.strategy import Strategy

# Large, because micro-batch counts vary
CAPACITY = 64


@dataclass(frozen=True, eq=False)
class BoundBlock:
    """Block with this rank's graphs and inputs.

    Attributes:
        aux: index of the aux graph's output for each template input.
        starts: first row of this rank's vocabulary shard, and the block's index, as inputs.
        enters: under sequence parallelism, whether another stage sends the hidden state.
        leaves: under sequence parallelism, whether the result is sent to another stage.
    """

    variant: Variant
    names: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    aux: Mapping[str, int]
    starts: Mapping[str, Tensor]
    enters: bool = False
    leaves: bool = False
    recompute: bool = False
    halves: Mapping[Work, BackwardPart] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prepared:
    """One rank's program and data.

    Attributes:
        pulls: exchanges by bucket name or, in streamed stages, by use of a bucket.
        pushes: as `pulls`, for gradients.
        handings: exchanges to second owners, by each bucket's last push.
        adds: pushes that follow another push of the bucket, and add to its result.
        at_home: buckets whose gradients accumulate directly in this rank's shard.
        shards: each parameter's offset and length in the local buffer, by used bucket.
    """

    program: RankProgram
    part: StagePart
    blocks: Mapping[str, BoundBlock]
    pulls: Mapping[str, Exchange]
    pushes: Mapping[str, Exchange]
    handings: Mapping[str, Exchange]
    adds: frozenset[str]
    at_home: frozenset[str]
    shards: Mapping[str, Mapping[str, tuple[int, int]]]
    stages: tuple[tuple[int, ...], ...]

    @cached_property
    def offloaded(self) -> frozenset[Value]:
        return frozenset(i.reads[0] for i in self.program.instructions if i.op is Op.OFFLOAD)


@dataclass(eq=False)
class Preparer:
    """Builder of programs, with a cache of `capacity` programs."""

    _program: Program
    _variants: Variants
    _buffers: Mapping[str, Tensor]
    _homes: Mapping[str, Layout]
    _rank: int
    _ranks: int
    capacity: int = CAPACITY
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self._buckets_by_name = {bucket.name: bucket for bucket in self._program.buckets}
        self._known = LRU[tuple[Strategy, tuple[int, ...], Purpose], Prepared](self.capacity)
        self._links = LRU[Hashable, tuple[Exchange, Exchange | None]](self.capacity * len(self._program.buckets))
        self._handings: dict[Layout, Exchange | None] = {}
        self._halves: dict[Variant, Mapping[Work, BackwardPart]] = {}

    def get(self, strategy: Strategy, counts: tuple[int, ...], purpose: Purpose) -> Prepared:
        """Return this rank's program for micro-batch `counts` by pipeline."""
        return self._known.get((strategy, counts, purpose), lambda: self._prepare(strategy, counts, purpose))

    def describe(self, strategy: Strategy, counts: tuple[int, ...], purpose: Purpose, rank: int) -> RankProgram:
        return rank_program(self._program.outline, strategy, counts, rank, mode_of(purpose), ranks=self._ranks)

    def _prepare(self, strategy: Strategy, counts: tuple[int, ...], purpose: Purpose) -> Prepared:
        mode = mode_of(purpose)
        variants = self._variants.for_purpose(purpose)
        strategy.check(self._program.layers, self._ranks, self._program.heads)
        placement = place(self._program.outline, strategy, counts)
        here = placement.stage_of.get(self._rank)
        part = here.part_of(self._rank) if here else StagePart()
        halved = mode != "evaluate" and strategy.schedule not in WHOLE_BACKWARD
        every = variants.program.blocks
        blocks = {every[k].name: self._bind(variants, k, part, here, halved) for k in here.positions} if here else {}
        # links: (operation, name) -> this rank's pull and push. last, first: bucket -> name of its last
        # and first push. apart: buckets whose gradients need their own buffer.
        links = {(turn.op, turn.name): self._link(turn, placement) for turn in turns(placement, mode)}
        pushes = {name: push for (op, name), (_, push) in links.items() if op is Op.PUSH and push is not None}
        last = {bucket_of(name): name for name in pushes}
        first = {bucket_of(name): name for name in reversed(pushes)}
        handings = {name: self._handing(self._homes[bucket]) for bucket, name in last.items()}
        apart = {bucket_of(name) for name, push in pushes.items() if not self._accumulates_at_home(name, push)}
        mine = placement.held(self._rank)
        return Prepared(
            rank_program(self._program.outline, strategy, counts, self._rank, mode, ranks=self._ranks),
            part,
            blocks,
            {name: pull for (op, name), (pull, _) in links.items() if op is Op.PULL},
            pushes,
            {name: handing for name, handing in handings.items() if handing is not None},
            frozenset(pushes.keys() - first.values()),
            frozenset(last.keys() - apart),
            {b.name: local_shards(b, part) for b in self._program.buckets if b.name in mine},
            tuple(stage.ranks for stage in placement.stages),
        )

    def _bind(self, variants: Variants, at: int, part: StagePart, stage: PlacedStage, halved: bool) -> BoundBlock:
        program = variants.program
        block = program.blocks[at]
        template = program.templates[block.template]
        parameters = local_parameters(program, block, template)
        variant = variants.get(block, part)
        visit = stage.visit_of(at)
        first, end = stage.blocks[visit]
        scores = program is not self._program and block is program.blocks[-1]
        others = [i for i in template.inputs if i.startswith("other.")]
        # Pipelines that share a stage agree on its neighbours.
        role = next(role for role in stage.roles if role.visit == visit)
        return BoundBlock(
            variant,
            dict(zip(template.parameters, block.parameters, strict=True)),
            {local: self._buffers[name] for local, name in zip(template.buffers, block.buffers, strict=True)},
            dict(zip(others, block.aux, strict=True)),
            vocabulary_starts(variant, parameters, part) | {DROPOUT_BLOCK: torch.tensor(program.number_of(block))},
            enters=part.sequence_parallel and at == first and bool(role.previous),
            leaves=part.sequence_parallel and at == end - 1 and (bool(role.following) or scores),
            recompute=bool(part.recompute),
            halves=self._halves_of(variant) if halved else {},
        )

    def _halves_of(self, variant: Variant) -> Mapping[Work, BackwardPart]:
        if variant not in self._halves:
            works = (Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT)
            self._halves[variant] = dict(zip(works, split_backward(variant), strict=True))
        return self._halves[variant]

    def _accumulates_at_home(self, name: str, push: Exchange) -> bool:
        return push.is_identity and self._homes[bucket_of(name)].local_size(self._rank) == push.target

    def _link(self, turn: Turn, placement: Placement) -> tuple[Exchange, Exchange | None]:
        bucket = self._buckets_by_name[turn.bucket]
        stages = turn.stages
        kinds = stage_kinds(self._program, bucket, placement, stages, self._variants.kinds)
        source = self._homes[bucket.name]
        # Layers with equal buckets, homes and stages share exchanges.
        key = (bucket.form, bucket.learns, source, stages, tuple(tuple(k.values()) for k in kinds))

        def make() -> tuple[Exchange, Exchange | None]:
            target = propagation(bucket, stages, kinds)
            return (
                pull_exchange(source, target, self._rank, self._ranks, self.device),
                push_exchange(target, source, self._rank, self._ranks, self.device) if bucket.learns else None,
            )

        return self._links.get(key, make)

    def _handing(self, owners: Layout) -> Exchange | None:
        if owners not in self._handings:
            self._handings[owners] = hand_exchange(owners, self._rank, self._ranks, self.device)
        return self._handings[owners]


def local_shards(bucket: Bucket, part: StagePart) -> dict[str, tuple[int, int]]:
    """Return each parameter's (offset, length) in elements in a bucket's local buffer."""
    shards = {}
    at = 0
    for parameter in bucket.parameters:
        length = sum(b - a for a, b in parameter.intervals(part.tp, part.index))
        shards[parameter.name] = (at, length)
        at += length
    return shards


def shard_view(parameter: Parameter, flat: Tensor, place: tuple[int, int], part: StagePart) -> Tensor:
    at, length = place
    return parameter.natural(flat[at : at + length], part.tp, part.index)

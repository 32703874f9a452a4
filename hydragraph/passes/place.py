"""Placement: the stage that runs each block in this iteration, and the stages that hold each bucket's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import Role
from hydragraph.ir.schedules.clock import Beat, Runs, beats
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class PlacedRole(Role):
    """Role of a stage in one of its pipelines, and its neighbours there.

    Attributes:
        depth: number of stages of the pipeline.
        previous, following: the ranks of the neighbouring stages, in tensor-parallel order; empty at the ends.
    """

    depth: int
    previous: tuple[int, ...] = ()
    following: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlacedStage:
    """Stage with work in this iteration.

    Attributes:
        roles: one for each of its pipelines that runs at least one micro-batch, in the strategy's order.
        ranks: in tensor-parallel order.
        layers: the half-open range of layers it computes.
        blocks: the half-open range of positions of the blocks it computes.
        kind: kind of the stage, shared by its ranks.
    """

    roles: tuple[PlacedRole, ...]
    ranks: tuple[int, ...]
    layers: tuple[int, int]
    blocks: tuple[int, int]
    kind: StageKind = StageKind()  # noqa: RUF009

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers of the micro-batches that it runs."""
        return tuple(m for role in self.roles for m in role.micro_batches)

    def role_of(self, micro_batch: int) -> PlacedRole:
        """Return its role in the pipeline that runs a micro-batch."""
        return next(role for role in self.roles if micro_batch in role.micro_batches)

    def part_of(self, rank: int) -> StagePart:
        """Return the part of the stage that a rank runs."""
        return StagePart(self.kind, self.ranks.index(rank))


@dataclass(frozen=True)
class Placement:
    """Placement of the blocks and weights of one iteration.

    Attributes:
        outline: outline of the model.
        schedule: the strategy's schedule.
        stages: the stages of pipelines with micro-batches, by pipeline and stage; a shared stage once, at its first
            place.
        holders: for each held bucket, in pull order, the ranks of each stage that uses it. A tied bucket may be held by
            the first and the last stage of one pipeline; a stage that uses it twice holds it once.
        joined: the pipelines, grouped by shared stages (`Strategy.joined`).
    """

    outline: Outline
    schedule: str
    stages: tuple[PlacedStage, ...]
    holders: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    joined: tuple[tuple[int, ...], ...]

    @cached_property
    def stage_of(self) -> Mapping[int, PlacedStage]:
        """The stage of each rank that has work."""
        return {rank: stage for stage in self.stages for rank in stage.ranks}

    def beats(self, stage: PlacedStage) -> Mapping[int, Beat]:
        """Return the timing of a stage, by pipeline."""
        joined = self._joined[stage.roles[0].pipeline]
        if joined[0] not in self._beats:
            # Computed on demand for pipelines that share stages: a rank only needs its own.
            self._beats.update(zip(joined, beats([self._runs(pipeline) for pipeline in joined]), strict=True))
        return {role.pipeline: self._beats[role.pipeline][role.stage] for role in stage.roles}

    def _runs(self, pipeline: int) -> Runs:
        chain = self._chains[pipeline]
        return Runs(chain[0][1].micro_batches, tuple(len(stage.micro_batches) for stage, _ in chain))

    @cached_property
    def _joined(self) -> Mapping[int, tuple[int, ...]]:
        """For each pipeline with work, all pipelines with work that it shares stages with, including itself."""
        working = [tuple(p for p in group if p in self._chains) for group in self.joined]
        return {pipeline: group for group in working for pipeline in group}

    @cached_property
    def _chains(self) -> Mapping[int, list[tuple[PlacedStage, PlacedRole]]]:
        """The stages of each pipeline with work, in order, with their roles in it."""
        chains: dict[int, list[tuple[PlacedStage, PlacedRole]]] = {}
        for stage in self.stages:
            for role in stage.roles:
                chains.setdefault(role.pipeline, []).append((stage, role))
        for chain in chains.values():
            chain.sort(key=lambda at: at[1].stage)
        return chains

    @cached_property
    def _beats(self) -> dict[int, list[Beat]]:
        return {}

    def held(self, rank: int) -> frozenset[str]:
        """Return the buckets whose weights a rank needs."""
        stage = self.stage_of.get(rank)
        return frozenset() if stage is None else stage_buckets(self.outline, stage)


def stage_buckets(outline: Outline, stage: PlacedStage) -> frozenset[str]:
    """Return the buckets that a stage's blocks use."""
    return frozenset(bucket for block in outline.blocks[slice(*stage.blocks)] for bucket in outline.weights[block])


def place(outline: Outline, strategy: Strategy, micro_batches: Sequence[int]) -> Placement:
    """Assign blocks to stages and buckets to the stages that use them.

    The first block is placed with layer 0, the last block with the last layer. Pipelines without micro-batches get no
    blocks.

    Args:
        outline: outline of the model.
        strategy: its pipelines have as many layers as the outline.
        micro_batches: number of micro-batches of each pipeline; 0 for an idle pipeline.

    Raises:
        ValueError: the numbers of layers or pipelines differ, or a number of micro-batches is negative.
    """
    if strategy.layers != outline.layers:
        raise ValueError(
            f"strategy {strategy}: {strategy.layers} layers, but the model has {outline.layers}; make them equal"
        )
    if len(micro_batches) != len(strategy.pipelines) or min(micro_batches) < 0:
        raise ValueError(
            f"micro_batches is {list(micro_batches)}: give one count, 0 or more, for each of the "
            f"{len(strategy.pipelines)} pipelines"
        )
    # A pipeline without micro-batches takes no part: its ranks hold no weights and push no gradients.
    stages: dict[tuple[int, ...], PlacedStage] = {}
    for pipeline, numbers in _numbered(strategy, micro_batches).items():
        for stage in _pipeline_stages(outline, strategy, pipeline, numbers):
            other = stages.get(stage.ranks)
            # `Strategy` has checked that stages with the same ranks are one: they differ only in their roles.
            stages[stage.ranks] = replace(other, roles=other.roles + stage.roles) if other else stage
    # One entry per stage that uses a bucket, not per block: a stage pulls a tied weight once, even if several blocks
    # use it. A shared stage also has one entry: its gradient is the sum over all its pipelines.
    holders: dict[str, list[tuple[int, ...]]] = {bucket: [] for bucket in outline.pull_order}
    for stage in stages.values():
        for bucket in stage_buckets(outline, stage):
            holders[bucket].append(stage.ranks)
    used = tuple((bucket, tuple(ranks)) for bucket, ranks in holders.items() if ranks)
    return Placement(outline, strategy.schedule, tuple(stages.values()), used, strategy.joined)


def _numbered(strategy: Strategy, micro_batches: Sequence[int]) -> dict[int, range]:
    """Number the micro-batches across pipelines that share stages; return the numbers of each pipeline that has any."""
    numbers = {}
    for group in strategy.joined:
        first = 0
        for pipeline in group:
            numbers[pipeline] = range(first, first + micro_batches[pipeline])
            first += micro_batches[pipeline]
    return {pipeline: numbers[pipeline] for pipeline, count in enumerate(micro_batches) if count > 0}


def _pipeline_stages(
    outline: Outline, strategy: Strategy, pipeline: int, micro_batches: range
) -> Iterator[PlacedStage]:
    stages = strategy.pipelines[pipeline].stages
    for i, (first, stage) in enumerate(zip(strategy.pipelines[pipeline].first_layers, stages, strict=True)):
        layers = (first, first + stage.layers)
        role = PlacedRole(
            pipeline,
            i,
            micro_batches,
            depth=len(stages),
            previous=stages[i - 1].devices if i > 0 else (),
            following=stages[i + 1].devices if i + 1 < len(stages) else (),
        )
        yield PlacedStage((role,), stage.devices, layers, outline.span(*layers), stage.kind)

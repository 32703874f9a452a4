"""Place: which stage runs which blocks in this iteration, and which stages hold each bucket's weights for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hydragraph.ir.outline import Outline
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class PlacedStage:
    """A stage that has work in this iteration.

    Attributes:
        pipeline, stage: where it is in the strategy.
        depth: how many stages its pipeline has.
        ranks: in tensor-parallel order.
        layers: the half-open range of layers it computes.
        blocks: the half-open range of positions of the blocks it computes.
        micro_batches: how many its pipeline runs, at least 1.
        kind: what its ranks run.
        previous, following: the ranks of the neighbouring stages, in tensor-parallel order; empty at the ends.
    """

    pipeline: int
    stage: int
    depth: int
    ranks: tuple[int, ...]
    layers: tuple[int, int]
    blocks: tuple[int, int]
    micro_batches: int
    kind: StageKind = StageKind()  # noqa: RUF009
    previous: tuple[int, ...] = ()
    following: tuple[int, ...] = ()

    def part_of(self, rank: int) -> StagePart:
        """Return which part of it one of its ranks is."""
        return StagePart(self.kind, self.ranks.index(rank))


@dataclass(frozen=True)
class Placement:
    """Where the blocks and weights of one iteration are.

    Attributes:
        outline: the model.
        schedule: the strategy's schedule.
        stages: those of pipelines that have micro-batches, by pipeline and stage.
        holders: per held bucket, in pull order, the ranks of each stage that uses it. A tied bucket may be held by the
            first and by the last stage of one pipeline; a stage that uses it twice holds it once.
    """

    outline: Outline
    schedule: str
    stages: tuple[PlacedStage, ...]
    holders: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    @cached_property
    def stage_of(self) -> Mapping[int, PlacedStage]:
        """The stage of each rank that has work."""
        return {rank: stage for stage in self.stages for rank in stage.ranks}

    def held(self, rank: int) -> frozenset[str]:
        """Return the buckets whose weights a rank needs."""
        stage = self.stage_of.get(rank)
        return frozenset() if stage is None else stage_buckets(self.outline, stage)


def stage_buckets(outline: Outline, stage: PlacedStage) -> frozenset[str]:
    """Return the buckets that a stage's blocks use."""
    return frozenset(bucket for block in outline.blocks[slice(*stage.blocks)] for bucket in outline.weights[block])


def place(outline: Outline, strategy: Strategy, micro_batches: Sequence[int]) -> Placement:
    """Assign blocks to stages and buckets to the stages that use them.

    The first block goes with layer 0, the last block with the last layer. Pipelines without micro-batches get nothing.

    Args:
        outline: the model.
        strategy: its pipelines, with as many layers as the outline.
        micro_batches: how many each pipeline runs; 0 for a pipeline with nothing to do.

    Raises:
        ValueError: when the counts of layers or of pipelines differ, or a count of micro-batches is negative.
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
    # A pipeline without micro-batches takes no part: its ranks hold no weights, and push nothing.
    stages = tuple(
        stage
        for pipeline, count in enumerate(micro_batches)
        if count > 0
        for stage in _pipeline_stages(outline, strategy, pipeline, count)
    )
    # One entry per stage that uses a bucket, not per block: a stage pulls a tied weight once, whatever blocks share it.
    holders: dict[str, list[tuple[int, ...]]] = {bucket: [] for bucket in outline.pull_order}
    for stage in stages:
        for bucket in stage_buckets(outline, stage):
            holders[bucket].append(stage.ranks)
    used = tuple((bucket, tuple(ranks)) for bucket, ranks in holders.items() if ranks)
    return Placement(outline, strategy.schedule, stages, used)


def _pipeline_stages(outline: Outline, strategy: Strategy, pipeline: int, micro_batches: int) -> list[PlacedStage]:
    stages = strategy.pipelines[pipeline].stages
    placed: list[PlacedStage] = []
    first = 0
    for i, stage in enumerate(stages):
        # Stages hold layers in order, so each begins where the one before it ends.
        layers = (first, first + stage.layers)
        first += stage.layers
        placed.append(
            PlacedStage(
                pipeline,
                i,
                depth=len(stages),
                ranks=stage.devices,
                layers=layers,
                blocks=outline.span(*layers),
                micro_batches=micro_batches,
                kind=stage.kind,
                previous=stages[i - 1].devices if i > 0 else (),
                following=stages[i + 1].devices if i + 1 < len(stages) else (),
            )
        )
    return placed

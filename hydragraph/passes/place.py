"""Placement: assignment of blocks to stages, and of weight buckets to the stages that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hydragraph.errors import Unsupported
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import Role, Span
from hydragraph.ir.schedules.clock import StageTimes, beats_of
from hydragraph.ir.schedules.schedule import Action, ScheduleShape
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD, schedule_of
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class PlacedRole(Role):
    """Role of a stage in a pipeline, and its neighbors.

    Attributes:
        previous, following: ranks of the neighboring stages, in tensor-parallel order; empty at the pipeline's ends.
        visit: index among the pipeline's stages on the same ranks.
    """

    depth: int
    previous: tuple[int, ...] = ()
    following: tuple[int, ...] = ()
    visit: int = 0


@dataclass(frozen=True)
class PlacedStage:
    """Stage that runs micro-batches, or all interleaved stages on the same ranks.

    Attributes:
        roles: one per pipeline with micro-batches, or per interleaved stage.
        layers, blocks: half-open ranges of each interleaved stage.
    """

    roles: tuple[PlacedRole, ...]
    ranks: tuple[int, ...]
    layers: tuple[Span, ...]
    blocks: tuple[Span, ...]
    kind: StageKind = StageKind()  # noqa: RUF009
    stream: bool | str = False
    offload: bool = False

    @property
    def streams_weights(self) -> bool:
        return self.stream is True

    @property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(m for role in self.roles for m in role.micro_batches))

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(k for span in self.blocks for k in range(*span))

    def role_of(self, micro_batch: int, visit: int = 0) -> PlacedRole:
        return next(role for role in self.roles if micro_batch in role.micro_batches and role.visit == visit)

    def visit_of(self, position: int) -> int:
        return next(visit for visit, span in enumerate(self.blocks) if position in range(*span))

    def part_of(self, rank: int) -> StagePart:
        return StagePart(self.kind, self.ranks.index(rank))


@dataclass(frozen=True, eq=False)
class ScheduleGroup:
    """Pipelines that are scheduled together.

    Attributes:
        numbers: row of each stage in `shape`, by the stage's ranks.
    """

    pipelines: tuple[int, ...]
    shape: ScheduleShape
    numbers: Mapping[tuple[int, ...], int]


def _group(stages: Mapping[int, Sequence[PlacedStage]], pipelines: tuple[int, ...]) -> ScheduleGroup:
    # Rows ascend along pipelines, unless an interleaved stage returns to earlier ranks.
    every = dict.fromkeys((stage.layers[0], stage.ranks) for pipeline in pipelines for stage in stages[pipeline])
    numbers = {ranks: number for number, (_, ranks) in enumerate(sorted(every))}
    counts = []
    rows = []
    for p in pipelines:
        ranks = {role.stage: (stage.ranks, role) for stage in stages[p] for role in stage.roles if role.pipeline == p}
        counts.append(len(ranks[0][1].micro_batches))
        rows.append(tuple(numbers[ranks[stage][0]] for stage in sorted(ranks)))
    return ScheduleGroup(pipelines, ScheduleShape(tuple(counts), tuple(rows)), numbers)


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of blocks and weights for one iteration.

    Attributes:
        stages: stages with micro-batches, by pipeline and stage; shared and interleaved stages occur once.
        holders: used buckets in pull order, each with the ranks of each stage that uses it.
    """

    outline: Outline
    schedule: str
    stages: tuple[PlacedStage, ...]
    holders: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    joined: tuple[tuple[int, ...], ...]

    @cached_property
    def stage_of(self) -> Mapping[int, PlacedStage]:
        return {rank: stage for stage in self.stages for rank in stage.ranks}

    def actions(self, stage: PlacedStage, mode: Mode) -> tuple[Action, ...]:
        """Return a stage's actions in order; `Action.pipeline` indexes `ScheduleGroup.pipelines`."""
        group = self._group_of[stage.roles[0].pipeline]
        return schedule_of(self.schedule, group.shape, mode).actions[group.numbers[stage.ranks]]

    def beats(self, stage: PlacedStage) -> Mapping[PlacedRole, StageTimes]:
        group = self._group_of[stage.roles[0].pipeline]
        every = beats_of(group.shape)
        return {role: every[group.pipelines.index(role.pipeline)][role.stage] for role in stage.roles}

    @cached_property
    def groups(self) -> tuple[ScheduleGroup, ...]:
        stages: dict[int, list[PlacedStage]] = {}
        for stage in self.stages:
            for pipeline in dict.fromkeys(role.pipeline for role in stage.roles):
                stages.setdefault(pipeline, []).append(stage)
        found = (tuple(pipeline for pipeline in joined if pipeline in stages) for joined in self.joined)
        return tuple(_group(stages, pipelines) for pipelines in found if pipelines)

    @cached_property
    def _group_of(self) -> Mapping[int, ScheduleGroup]:
        return {pipeline: group for group in self.groups for pipeline in group.pipelines}

    @property
    def streams(self) -> bool:
        return any(stage.stream for stage in self.stages)

    def peers_of(self, rank: int) -> tuple[int, ...]:
        stage = self.stage_of.get(rank)
        return () if stage is None else stage.ranks

    def held(self, rank: int) -> frozenset[str]:
        stage = self.stage_of.get(rank)
        return frozenset() if stage is None else stage_buckets(self.outline, stage)


def stage_buckets(outline: Outline, stage: PlacedStage) -> frozenset[str]:
    return frozenset(bucket for k in stage.positions for bucket in outline.weights[outline.blocks[k]])


def place(outline: Outline, strategy: Strategy, micro_batches: Sequence[int]) -> Placement:
    """Assign each block to a stage, and each bucket to the stages that use it.

    The first and last blocks join the stages of the first and last layers.

    Raises:
        ValueError: the layer or pipeline counts differ, or a micro-batch count is negative.
        Unsupported: a stage streams or offloads, and the schedule splits backwards.
    """
    return _place(outline, strategy, tuple(micro_batches))


def refuse_streams(strategy: Strategy) -> None:
    """Raise Unsupported if a stage streams or offloads under a schedule that splits backwards.

    Each half would pull the weights, and fetched activations would stay on the device between the halves.
    """
    if strategy.streams:
        require_whole_backward(strategy, "streaming stages", "leave out w and g in the strategy text")
    if strategy.offloads:
        require_whole_backward(strategy, "offloading stages", "leave out o in the strategy text")


def require_whole_backward(strategy: Strategy, what: str, otherwise: str) -> None:
    if strategy.schedule not in WHOLE_BACKWARD:
        raise Unsupported(
            f"{what} under schedule {strategy.schedule}, which splits each backward in two",
            where=f"strategy {strategy}",
            remedy=f"use schedule {' or '.join(sorted(WHOLE_BACKWARD))}, or {otherwise}",
        )


# All ranks share one placement
@lru_cache(maxsize=4)
def _place(outline: Outline, strategy: Strategy, micro_batches: tuple[int, ...]) -> Placement:
    if strategy.layers != outline.layers:
        raise ValueError(
            f"strategy {strategy} has {strategy.layers} layers, but the model has {outline.layers}: make them equal"
        )
    if len(micro_batches) != len(strategy.pipelines) or min(micro_batches) < 0:
        raise ValueError(
            f"micro_batches is {list(micro_batches)}: give one count, 0 or more, for each of the "
            f"{len(strategy.pipelines)} pipelines"
        )
    refuse_streams(strategy)
    # Stages on the same ranks are joined, whether of several pipelines (shared) or of one
    # (interleaved).
    stages: dict[tuple[int, ...], PlacedStage] = {}
    for pipeline, numbers in _numbered(strategy, micro_batches).items():
        for stage in _pipeline_stages(outline, strategy, pipeline, numbers):
            other = stages.get(stage.ranks)
            stages[stage.ranks] = _joined(other, stage) if other else stage
    holders: dict[str, list[tuple[int, ...]]] = {bucket: [] for bucket in outline.pull_order}
    for stage in stages.values():
        for bucket in stage_buckets(outline, stage):
            holders[bucket].append(stage.ranks)
    used = tuple((bucket, tuple(ranks)) for bucket, ranks in holders.items() if ranks)
    return Placement(outline, strategy.schedule, tuple(stages.values()), used, strategy.joined)


def _joined(one: PlacedStage, other: PlacedStage) -> PlacedStage:
    (role,) = other.roles
    if role.pipeline != one.roles[-1].pipeline:
        return replace(one, roles=(*one.roles, role))
    # The pipeline returns to these ranks with other layers.
    role = replace(role, visit=len(one.blocks))
    return replace(one, roles=(*one.roles, role), layers=one.layers + other.layers, blocks=one.blocks + other.blocks)


def _numbered(strategy: Strategy, micro_batches: Sequence[int]) -> dict[int, range]:
    # Joined pipelines number micro-batches together: counts (3, 2) give 0 to 2 and 3 to 4.
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
        yield PlacedStage(
            (role,), stage.devices, (layers,), (outline.span(*layers),), stage.kind, stage.stream, stage.offload
        )

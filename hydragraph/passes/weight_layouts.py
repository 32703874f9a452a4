"""Layouts of buckets: the ranks that own each element, and the ranks that compute with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from hydragraph.errors import Unsupported
from hydragraph.ir.layout import GradientKind, Layout, propagation
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program import Block, Program
from hydragraph.passes.place import Placement, place
from hydragraph.passes.shard import gradient_kinds
from hydragraph.passes.variants import local_parameters
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.strategy import Strategy

KindsOf = Callable[[Block, StagePart], Mapping[str, GradientKind]]


@dataclass(frozen=True)
class BucketLayouts:
    bucket: Bucket
    home: Layout
    used: Layout


def layouts(program: Program, strategy: Strategy, homes: Mapping[str, Layout]) -> list[BucketLayouts]:
    """Return the layouts of all buckets if all of a strategy's pipelines have micro-batches."""
    placement = place(program.outline, strategy, [1] * len(strategy.pipelines))
    holders = dict(placement.holders)
    kinds_of = kinds_once(program)
    used_layouts: dict[Hashable, Layout] = {}
    result = []
    for bucket in program.buckets:
        stages = holders.get(bucket.name, ())
        kinds = stage_kinds(program, bucket, placement, stages, kinds_of)
        # Most layers' buckets have equal forms, stages and kinds, and share a layout.
        key = (bucket.form, stages, tuple(tuple(kinds_by_name.values()) for kinds_by_name in kinds))
        if key not in used_layouts:
            used_layouts[key] = propagation(bucket, stages, kinds)
        result.append(BucketLayouts(bucket, homes[bucket.name], used_layouts[key]))
    return result


def stage_kinds(
    program: Program, bucket: Bucket, placement: Placement, stages: Sequence[tuple[int, ...]], kinds_of: KindsOf
) -> list[dict[str, GradientKind]]:
    # A stage's first rank represents all.
    parts = [placement.stage_of[ranks[0]].part_of(ranks[0]) for ranks in stages]
    return [bucket_kinds(program, bucket, part, kinds_of) for part in parts]


def bucket_kinds(program: Program, bucket: Bucket, part: StagePart, kinds_of: KindsOf) -> dict[str, GradientKind]:
    """Return the gradient kinds of a bucket's parameters in a stage, or REPLICA if it is frozen.

    Raises:
        Unsupported: a shared parameter gets a full gradient from one block and a partial gradient from another.
    """
    if not bucket.learns:
        return {p.name: GradientKind.REPLICA for p in bucket.parameters}
    # Blocks' gradients of a tied weight are summed, so their kinds must be equal.
    kind_of: dict[str, GradientKind] = {}
    for block in (b for b in program.blocks if b.name in bucket.blocks):
        template = program.templates[block.template]
        kinds = kinds_of(block, part)
        for local, name in zip(template.parameters, block.parameters, strict=True):
            if kind_of.setdefault(name, kinds[local]) is not kinds[local]:
                raise Unsupported(
                    f"{name} gets a full gradient from one block and a partial gradient from another at tp {part.tp}",
                    where=block.name,
                    remedy="untie the parameter, or use tensor-parallel degree 1 for the stages that use it",
                )
    return {p.name: kind_of[p.name] for p in bucket.parameters}


def kinds_once(program: Program) -> KindsOf:
    """Return a function that analyzes each template only once for each part of a stage."""
    kinds_by_template: dict[tuple[str, int, bool], Mapping[str, GradientKind]] = {}

    def kinds_of(block: Block, part: StagePart) -> Mapping[str, GradientKind]:
        key = (block.template, part.tp, part.sequence_parallel)
        if key not in kinds_by_template:
            template = program.templates[block.template]
            kinds_by_template[key] = gradient_kinds(template, local_parameters(program, block, template), part)
        return kinds_by_template[key]

    return kinds_of

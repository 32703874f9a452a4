"""What pulls and pushes of a strategy move: bytes exactly, from the link; seconds and overlap by event simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.messages import GRADIENT_BYTES
from hydragraph.cost.simulate import simulate
from hydragraph.cost.work import Without
from hydragraph.ir.layout import GradientKind, Layout, home, propagation
from hydragraph.ir.link import Slices, copy, reduce
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program import Program
from hydragraph.passes.pipeline import rank_programs
from hydragraph.passes.place import PlacedStage, place
from hydragraph.passes.shard import Degree
from hydragraph.runtime.variants import Variants
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, Link
from hydragraph.spec.strategy import Strategy

Direction = Literal["pull", "push"]
DIRECTIONS: tuple[Direction, ...] = ("pull", "push")


@dataclass(frozen=True)
class Traffic:
    """What one direction moves in one step.

    Attributes:
        pairs: (sending rank, receiving rank) -> bytes between two different ranks.
        local: bytes that stay on their rank.
    """

    pairs: Mapping[tuple[int, int], int]
    local: int

    @property
    def total(self) -> int:
        """Bytes between ranks."""
        return sum(self.pairs.values())

    @property
    def most(self) -> int:
        """The most bytes that one rank sends or receives."""
        loads: dict[tuple[str, int], int] = defaultdict(int)
        for (source, target), size in self.pairs.items():
            loads["out", source] += size
            loads["in", target] += size
        return max(loads.values(), default=0)


@dataclass(frozen=True)
class Overlap:
    """How well communication hides behind computation.

    Attributes:
        alone_s: what it takes with nothing beside it.
        exposed_s: what it adds to a step.
        step_s: the step with it.
    """

    alone_s: float
    exposed_s: float
    step_s: float

    @property
    def percent(self) -> float:
        """100 (1 - exposed / alone), from 0 to 100: sharing processors with computation may expose more than all."""
        if self.alone_s <= 0:
            return 100.0
        return 100 * min(1.0, max(0.0, 1 - self.exposed_s / self.alone_s))


@dataclass(frozen=True)
class BucketLayouts:
    """Where one bucket's state lives: at home, and where a strategy computes with it."""

    bucket: Bucket
    home: Layout
    used: Layout


def layouts(program: Program, strategy: Strategy, ranks: int) -> list[BucketLayouts]:
    """Return the layouts of every bucket when all pipelines of a strategy have work."""
    placement = place(program.outline, strategy, [1] * len(strategy.pipelines))
    holders = dict(placement.holders)
    variants = Variants(program)
    result = []
    for bucket in program.buckets:
        stages = holders.get(bucket.name, ())
        kinds = [_kinds(program, variants, bucket, placement.stage_of[members[0]]) for members in stages]
        result.append(BucketLayouts(bucket, home(bucket.size, range(ranks)), propagation(bucket, stages, kinds)))
    return result


def _kinds(program: Program, variants: Variants, bucket: Bucket, stage: PlacedStage) -> dict[str, GradientKind]:
    """Return the gradient kinds of a bucket's parameters in one stage."""
    degree = Degree(len(stage.ranks), 0, stage.sequence_parallel)
    kind_of: dict[str, GradientKind] = {}
    for block in (b for b in program.blocks if b.name in bucket.blocks):
        kinds = variants.kinds(block, degree)
        kind_of |= {name: kinds[local] for local, name in zip(kinds, block.parameters, strict=True)}
    return {p.name: kind_of[p.name] for p in bucket.parameters}


def traffic(program: Program, placed: Sequence[BucketLayouts], direction: Direction) -> Traffic:
    """Return what a pull (in the compute dtype) or a push (in fp32) moves."""
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for bucket_layouts in placed:
        if direction == "pull":
            _add(pairs, copy(bucket_layouts.home, bucket_layouts.used), program.dtype.itemsize)
        else:
            _add(pairs, reduce(bucket_layouts.used, bucket_layouts.home), GRADIENT_BYTES)
    between = {pair: size for pair, size in sorted(pairs.items()) if pair[0] != pair[1]}
    return Traffic(between, sum(size for (a, b), size in pairs.items() if a == b))


def _add(pairs: dict[tuple[int, int], int], slices: Slices, itemsize: int) -> None:
    for source, target, elements in zip(
        slices.src.tolist(), slices.dst.tolist(), (slices.hi - slices.lo).tolist(), strict=True
    ):
        pairs[source, target] += elements * itemsize


def simulated(
    program: Program,
    strategy: Strategy,
    cluster: Cluster,
    tokens: int,
    micro_batches: int,
    direction: Direction,
    moved: Traffic,
) -> Overlap:
    """Simulate a step with and without one direction's traffic, and that traffic with nothing beside it.

    Args:
        tokens: of a micro-batch, one sequence.
        micro_batches: of every pipeline.
        moved: the traffic; where there is none, nothing is alone or exposed.
    """
    counts = [micro_batches] * len(strategy.pipelines)
    programs = rank_programs(program.outline, strategy, counts, "train", ranks=len(cluster.devices))
    degrees = sorted({stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages})
    costs = Costs(datasheet(program, cluster, degrees=degrees), cluster)
    work = costs.work(strategy, Assignment.even(counts, tokens))
    other: Direction = "push" if direction == "pull" else "pull"
    without = Without(work, direction)
    alone = Without(work, "computing", "messages", "ending", other)
    idle = Without(work, "computing", "messages", "ending", "pull", "push")
    whole, less, by_itself, nothing = (
        simulate(programs, cluster, variant).seconds for variant in (work, without, alone, idle)
    )
    if not moved.total:
        return Overlap(0.0, 0.0, whole)
    return Overlap(by_itself - nothing, max(0.0, whole - less), whole)


def default_cluster(ranks: int) -> Cluster:
    """Return H200s of 989 TFLOP/s, eight in a node, with NVLink and 400 Gb/s between nodes.

    NVLink 4 carries 450 GB/s in each direction; a node's eight network cards of 400 Gb/s give each GPU 50 GB/s.
    """
    return Cluster.homogeneous(
        ranks,
        device=Device(989e12, int(141e9), 4.8e12),
        within_node=Link(450e9, 5e-6),
        between_nodes=Link(50e9, 10e-6),
        ranks_per_node=8,
    )

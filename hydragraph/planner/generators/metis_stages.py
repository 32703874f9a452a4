"""Metis's search with `Costs`: stages over all devices, with different data-parallel degrees.

Metis's cost model ranks the plans, and `Costs` predicts times. Unlike in Metis, a replica's ranks are in one node, and
memory is limited per rank.

Each replica of a stage of data-parallel degree dp serves dp_max / dp of the dp_max pipelines. Example with dp 4 on
ranks 0 to 3, and dp 2 and tp 2 on ranks 4 to 7:

    <[0]x3,[4,5]x5> + <[1]x3,[4,5]x5> + <[2]x3,[6,7]x5> + <[3]x3,[6,7]x5>
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hydragraph.cost.costs import Costs
from hydragraph.cost.footprint import Footprint, MicroBatch
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.errors import Unsupported
from hydragraph.ir.schedules.schedule_kinds import in_flight
from hydragraph.planner.deadline import is_late
from hydragraph.planner.metis.cluster import MetisCluster, MetisDeviceType
from hydragraph.planner.metis.metis_search import FoundPlan, Order, exact, walked
from hydragraph.planner.metis.metis_walk import MEMORY, NAIVE
from hydragraph.planner.metis.problem import MetisProblem, StagePlan
from hydragraph.planner.metis.profile import Measurement, MetisProfile
from hydragraph.planner.price_candidate import Candidate
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy

# Maximum device types, because all orders of types are tried.
_MOST_TYPES = 5
_FLYING = (1, 2, 4, 8, 16)
# Bytes of messages in flight per byte of weights and gradients, and the usable fraction of memory.
_MESSAGES = 0.7
_SAFETY = 0.97
# Assumed seconds to simulate a stage's micro-batch.
_STEP_S = 1e-3
# Metis's units: MB, and 2^20 bytes per millisecond.
_MB = 2**20


def staged(
    costs: Costs, sequences: int, length: int, order: Order = "memory", until: float | None = None
) -> list[Candidate]:
    """Return plans for equal sequences on all running devices; at the deadline `until`, those found so far.

    Their seconds include pull and push only if pipelines share stages.
    """
    devices = TypedDevices(costs)
    plans: dict[Strategy, Candidate] = {}
    # Plans with no more micro-batches in flight than assumed
    likely: set[Strategy] = set()
    laid: dict[object, Candidate | None] = {}
    for recompute in (False, True):
        if is_late(until):
            break
        layers = _layers(costs, devices, sequences, length, recompute)
        if {kind for kind, _, _ in layers} != set(devices.cluster.counts):
            continue
        for flying in _FLYING:
            if flying >= 2 * costs.outline.layers or is_late(until):
                break
            profile = _profile(costs, layers, length, flying)
            largest = max(tp for _, tp, _ in layers)
            best = _found(MetisProblem(profile, devices.cluster, sequences, largest, per_rank=True), order, until)
            if best is None:
                continue
            key = (best.types, best.groups, best.degrees, best.layers, best.batches, recompute)
            if key not in laid:
                laid[key] = laid_out(costs, devices, best, length, recompute, until)
            plan = laid[key]
            if plan is not None:
                plans.setdefault(plan.strategy, plan)
                if _is_enough(best, flying):
                    likely.add(plan.strategy)
    if not laid and not is_late(until):
        raise Unsupported(
            f"{devices.cluster.devices} devices in stages of 1, 2, 4, ... ranks do not have enough memory for the "
            f"model's {costs.outline.layers} layers and {sequences} sequences of {length} tokens",
            where="plan with Metis's stages",
            remedy='use method="auto", add devices, shorten the sequences, or profile more degrees or recomputation',
        )
    return sorted(plans.values(), key=lambda plan: (plan.strategy not in likely, plan.seconds))


class TypedDevices:
    """The devices that run, as Metis describes them: devices with different rates have different types."""

    def __init__(self, costs: Costs) -> None:
        cluster = costs.cluster
        nodes: dict[tuple[int, str], list[int]] = {}
        for rank in range(costs.ranks):
            rate = costs.health.rate(rank)
            if math.isfinite(rate):
                kind = cluster.type_of(rank) + (f" at rate {rate:g}" if rate > 1 else "")
                nodes.setdefault((cluster.node_of(rank), kind), []).append(rank)

        # In this order, groups of 1, 2, 4, ... ranks do not span nodes.
        self._nodes = dict(sorted(nodes.items(), key=lambda item: -(len(item[1]) & -len(item[1]))))
        several = len({node for node, _ in nodes}) > 1
        types: dict[str, MetisDeviceType] = {}
        for (number, kind), ranks in nodes.items():
            node = cluster.node(number)
            link = node.outer if several else node.inner
            bandwidth = link.bytes_per_s / (_MB * 1000)
            memory = min(_SAFETY * costs.memory_of(rank) - costs.owned_bytes(rank) for rank in ranks) / 2**30
            if kind in types:
                bandwidth = min(bandwidth, types[kind].bandwidth)
                memory = min(memory, types[kind].memory_gb)
            types[kind] = MetisDeviceType(bandwidth, max(memory, 1e-9))
        if len(types) > _MOST_TYPES:
            raise Unsupported(
                f"the devices have {len(types)} combinations of type and rate, too many to try in every order",
                where="plan with Metis's stages",
                remedy='use method="auto" or "straggler"',
            )
        self.cluster = MetisCluster(types, tuple((kind, len(ranks)) for (_, kind), ranks in self._nodes.items()))

    def ranks(self, types: tuple[str, ...]) -> list[int]:
        return [rank for kind in types for (_, of), ranks in self._nodes.items() if of == kind for rank in ranks]

    def example(self, kind: str, count: int) -> tuple[int, ...] | None:
        largest = max((ranks for (_, of), ranks in self._nodes.items() if of == kind), key=len)
        return tuple(largest[:count]) if len(largest) >= count else None


def _found(problem: MetisProblem, order: Order, until: float | None) -> FoundPlan | None:
    try:
        if order == "exact":
            return exact(problem, mixed_tp=False, groups="all", until=until)
        return walked(problem, MEMORY if order == "memory" else NAIVE, mixed_tp=False)
    except ValueError:
        return None


class _Layer(NamedTuple):
    seconds: float
    state: float
    kept: float


def _layers(
    costs: Costs, devices: TypedDevices, sequences: int, length: int, recompute: bool
) -> dict[tuple[str, int, int], list[_Layer]]:
    divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
    replicas = [1 << i for i in range(devices.cluster.devices.bit_length())]
    sizes = {sequences // dp // batches for dp in replicas for batches in divisors} - {0}
    sizes |= {1 << i for i in range(sequences.bit_length())}
    measured_layers = {}
    for kind in devices.cluster.counts:
        type_ = costs.cluster.type_of(devices.ranks((kind,))[0])
        for stage_kind in sorted(costs.profile.of(type_).pieces):
            tp = stage_kind.tp
            example = devices.example(kind, tp)
            plain = stage_kind == StageKind(tp, False, recompute)
            if not plain or example is None or tp & (tp - 1) or not costs.sizes.allows(tp):
                continue
            stage = Stage(example, 1, recompute=recompute)
            for size in sorted(sizes):
                measured_layers[kind, tp, size] = _measured(costs, stage, size, length)
    return measured_layers


def _measured(costs: Costs, stage: Stage, sequences: int, length: int) -> list[_Layer]:
    alike: dict[tuple[str, ...], _Layer] = {}
    measured_layers = []
    for layer in range(costs.outline.layers):
        span = costs.outline.span(layer, layer + 1)
        templates = costs.profile.blocks[slice(*span)]
        if templates not in alike:
            alike[templates] = _one(costs, stage, span, sequences, length)
        measured_layers.append(alike[templates])
    return measured_layers


def _one(costs: Costs, stage: Stage, span: tuple[int, int], sequences: int, length: int) -> _Layer:
    pieces = costs.pieces(costs.cluster.type_of(stage.devices[0]), stage.kind)
    # Bytes are linear in the number of equal sequences.
    one, two = (MicroBatch(n * length, n) for n in (1, 2))
    state = 0.0
    kept = 0.0
    for at in range(*span):
        piece = pieces[costs.profile.blocks[at]]
        state += costs.sizes.itemsize * piece.parameters + GRADIENT_BYTES * (piece.parameters - piece.frozen)
        single, both = (
            costs.blocks.footprint(costs.outline.blocks[at], StagePart(stage.kind, 0), n) for n in (one, two)
        )
        kept += _kept(single) + (sequences - 1) * (_kept(both) - _kept(single))
    several = 1 + _MESSAGES if costs.ranks > 1 else 1.0
    seconds = sum(costs.stage(stage, span).apart([length] * sequences))
    return _Layer(seconds, several * state, kept)


def _kept(held: Footprint) -> int:
    return held.saved + held.output


def _profile(
    costs: Costs, layers: Mapping[tuple[str, int, int], Sequence[_Layer]], length: int, flying: int
) -> MetisProfile:
    measurements = {}
    for key, rows in layers.items():
        times = tuple(1e3 * row.seconds for row in rows)
        memory = tuple((row.state + flying * row.kept) / _MB for row in rows)
        measurements[key] = Measurement(times, sum(times), memory)
    last = costs.outline.layers - 1
    first, middle, end = (float(_gradients(costs, layer)) for layer in (0, min(1, last), last))
    hidden = costs.sizes.hidden_bytes
    return MetisProfile(measurements, (first, middle, end), 0.0, 0.0, hidden, length, hidden)


def _gradients(costs: Costs, layer: int) -> int:
    blocks = costs.outline.blocks[slice(*costs.outline.span(layer, layer + 1))]
    users = dict(costs.outline.buckets)
    return GRADIENT_BYTES * sum(b.size for b in costs.buckets if b.learns and users[b.name][0] in blocks)


def pipelines_of(plan: StagePlan, ranks: list[int], recompute: bool = False) -> tuple[Pipeline, ...]:
    """Return a plan's stages as pipelines that share replicas; every stage's dp must divide the largest dp."""
    count = max(dp for dp, _ in plan.degrees)
    by_stage: list[list[Stage]] = []
    start = 0
    for (dp, tp), group, layers in zip(plan.degrees, plan.groups, plan.layers, strict=True):
        replicas = [
            Stage(tuple(ranks[start + i * tp : start + (i + 1) * tp]), layers, recompute=recompute) for i in range(dp)
        ]
        by_stage.append([replicas[p * dp // count] for p in range(count)])
        start += group
    return tuple(Pipeline(stages) for stages in zip(*by_stage, strict=True))


def laid_out(
    costs: Costs, devices: TypedDevices, found: FoundPlan, length: int, recompute: bool, until: float | None = None
) -> Candidate | None:
    """Return a search result as a candidate, or None if stages cannot be shared or simulated by `until`."""
    pipelines = pipelines_of(found, devices.ranks(found.types), recompute)
    try:
        strategy = Strategy(pipelines)
    except ValueError:
        return None
    together = max(1, found.problem.batch // (found.batches * len(pipelines)))
    load = [length] * together
    seconds = [
        1.0 if strategy.shares else max(sum(s.apart(load)) for s in costs.stages(pipeline)) for pipeline in pipelines
    ]
    assignment = _assigned(found.problem.batch, together, seconds, length)
    if not strategy.shares:
        return Candidate(strategy, "search", costs.pipelines_end(strategy, assignment), together, assignment=assignment)
    steps = sum(count * len(p.stages) for count, p in zip(assignment.counts, pipelines, strict=True))
    if is_late(until, _STEP_S * steps):
        return None
    simulated_s = costs.simulate(strategy, assignment).seconds
    return Candidate(strategy, "search", simulated_s, together, assignment=assignment)


def _assigned(batch: int, together: int, seconds: Sequence[float], length: int) -> Assignment:
    counts = [0] * len(seconds)
    queue = [(pipeline_s, p) for p, pipeline_s in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(batch):
        end, p = heapq.heappop(queue)
        counts[p] += 1
        heapq.heappush(queue, (end + seconds[p], p))
    micro_batches = []
    first = 0
    for count in counts:
        many = -(-count // together)
        bounds = [first + count * i // many for i in range(many + 1)] if many else []
        micro_batches.append(tuple(tuple(range(*span)) for span in pairwise(bounds)))
        first += count
    return Assignment(tuple(micro_batches), (length,) * batch)


def _is_enough(plan: StagePlan, flying: int) -> bool:
    most = max(dp for dp, _ in plan.degrees)
    depth = in_flight(DEFAULT_SCHEDULE, len(plan.degrees), plan.batches)
    return all(flying >= most // dp * deep for (dp, _), deep in zip(plan.degrees, depth, strict=True))

"""Conversion of a search candidate to a runnable strategy: rank placement, assignment, exact seconds and memory.

The search works with forms of groups and average layers. This module maps groups to ranks, distributes micro-batches by
the exact replay of the schedule with messages between stages, walks memory (`rank_memory.Walk`), and chooses state
owners.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.compiled_replay import replay, scratch_of
from hydragraph.cost.costs import Costs
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.pricing import micro_batches_of
from hydragraph.cost.rank_memory import batch_bytes, telling
from hydragraph.cost.stage_costs import StageCost
from hydragraph.ir.schedules.schedule_kinds import table_of
from hydragraph.planner.generators.device_groups import Group
from hydragraph.planner.generators.group_prices import state_bytes
from hydragraph.planner.generators.pipeline_shares import shares
from hydragraph.planner.generators.pipelines_of_groups import Bench, Laid, Partition
from hydragraph.planner.state_shares import fractions, home_by_block, home_of, lacking
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Pipeline, Stage, Strategy

Line = tuple[float, float]  # bytes, and bytes per unit share of the state

# Maximum number of micro-batches moved between pipelines after the initial distribution.
MOVES = 64
# Fraction of a device's memory that plans may use: walks with messages seldom exceed the estimate.
NEAR_LIMIT = 0.99


@dataclass(frozen=True)
class SearchCandidate:
    """A result of the search: pipelines of forms.

    Attributes:
        bench: the bench that priced it.
        partition: the forms of each pipeline.
        groups: groups of ranks with these forms.
        together: sequences in a micro-batch.
        origin: the search that found it.
        layout: layout of each kind of pipeline, if it differs from the bench's.
    """

    bench: Bench
    partition: Partition
    groups: tuple[Group, ...]
    together: int
    origin: str
    layout: tuple[Laid, ...] | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the search expects."""
        return self.partition.seconds

    @property
    def shape(self) -> object:
        """Key that similar candidates share: degrees, and the number of pipelines of each depth."""
        depths = Counter(len(multiset) for multiset, n in self.partition.pipelines for _ in range(n))
        forms = Counter((form.site.type, form.tp) for form in self.bench.forms)
        return frozenset(depths.items()), frozenset(forms), self.together

    def laid(self) -> list[Laid]:
        """Return the layout of every pipeline."""
        count = max(1, round(self.bench.micro_batches / self.partition.count))
        layout = self.layout or [self.bench.lay(m, count) for m, _ in self.partition.pipelines]
        return [each for each, (_, times) in zip(layout, self.partition.pipelines, strict=True) for _ in range(times)]

    def exposed_s(self) -> float:
        """Return the largest time of pull and push that a pipeline cannot overlap."""
        laid = self.laid()
        return max(each.exposed_s + more for each, more in zip(laid, self.bench.awaited(laid), strict=True))


@dataclass(frozen=True)
class Settled:
    """A runnable strategy with its home, assignments, seconds and memory.

    Attributes:
        strategy, home: what runs.
        assignments: assignment of each mini-batch.
        by_batch: seconds of each mini-batch; infinite if it cannot take the longest sequence.
        memory: peak bytes of every rank.
        origin: see `SearchCandidate`.
        simulated: whether the seconds were simulated; otherwise they are the slowest pipeline's and an estimate of
            traffic.
    """

    strategy: Strategy
    home: Home
    assignments: tuple[Assignment, ...]
    by_batch: tuple[float, ...]
    memory: tuple[int, ...]
    origin: str
    simulated: bool

    @property
    def seconds(self) -> float:
        """Mean seconds of an iteration."""
        return math.fsum(self.by_batch) / len(self.by_batch)


@dataclass(frozen=True)
class Shortage:
    """A strategy that does not fit: the rank that is shortest of memory, and the missing bytes."""

    strategy: Strategy
    rank: int
    bytes: float

    def __str__(self) -> str:
        return f"rank {self.rank} lacks {self.bytes / 1e9:.3g} GB"


def strategies_of(candidate: SearchCandidate) -> list[Strategy]:
    """Return the pipelines placed on ranks: each within as few nodes as possible, and each across nodes."""
    laid = candidate.laid()
    found = [_placed(candidate, laid, by_stage=False)]
    across = _placed(candidate, laid, by_stage=True)
    return found if across == found[0] else [found[0], across]


def _placed(candidate: SearchCandidate, laid: Sequence[Laid], by_stage: bool) -> Strategy:
    """Assign ranks to stages, pipeline by pipeline or stage by stage."""
    waiting: dict[int, list[Group]] = {}
    index = {form: i for i, form in enumerate(candidate.bench.forms)}
    for group in candidate.groups:
        waiting.setdefault(index[group.form], []).append(group)
    places = [(p, s) for p, each in enumerate(laid) for s in range(len(each.order))]
    if by_stage:
        places.sort(key=lambda place: (place[1], place[0]))
    chosen: dict[tuple[int, int], Group] = {}
    for p, s in places:
        chosen[p, s] = waiting[laid[p].order[s]].pop(0)
    pipelines = []
    for p, each in enumerate(laid):
        stages = tuple(
            Stage(chosen[p, s].devices, layers, kind.sequence_parallel, kind.recompute)
            for s, (layers, kind) in enumerate(zip(each.layers, each.kinds, strict=True))
        )
        pipelines.append(Pipeline(stages))
    # Canonical order, so that the same strategy found in different ways compares equal.
    return Strategy(tuple(sorted(pipelines, key=lambda pipeline: min(pipeline.devices))))


class Ends:
    """Exact end times of pipelines that run equal micro-batches; equal pipelines are computed once."""

    def __init__(self, costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._schedule = strategy.schedule
        self._parts: list[tuple[StageCost, ...]] = []
        self._rows: list[NDArray[np.float64]] = []  # times of a micro-batch by stage, as `replay` takes them
        self._devices: list[tuple[int, ...]] = []  # `Pipeline.rows`
        self._alike: list[int] = []
        known: dict[object, int] = {}
        for pipeline in strategy.pipelines:
            form = form_of(costs, pipeline)
            if form not in known:
                known[form] = len(self._parts)
                parts = costs.stages(pipeline)
                self._parts.append(parts)
                self._rows.append(np.array([[_row(stage, self._lengths) for stage in parts]]))
                self._devices.append(pipeline.rows)
            self._alike.append(known[form])
        self._ends: dict[tuple[int, int], float] = {}

    def end(self, pipeline: int, count: int) -> float:
        """Return the time when a pipeline has run `count` micro-batches."""
        key = (self._alike[pipeline], count)
        if key not in self._ends:
            self._ends[key] = self._end(*key)
        return self._ends[key]

    def _end(self, kind: int, count: int) -> float:
        parts = self._parts[kind]
        order = np.zeros(count, np.int64)
        scratch = scratch_of(len(parts), count)
        table = table_of(self._schedule, self._devices[kind], count)
        return float(replay(table, len(parts), self._rows[kind], order, count, scratch))

    def counts(self, micro_batches: int) -> list[int]:
        """Return the number of micro-batches of each pipeline that minimizes the end of the last one."""
        number = len(self._alike)
        # Once full, a pipeline takes one more step of its slowest stage for each further micro-batch.
        first = np.array([self.end(p, 1) for p in range(number)])
        steps = [float((row[0, :, 0] + row[0, :, 1] + row[0, :, 2]).max()) for row in self._rows]
        each = np.array([steps[k] for k in self._alike])
        counts = [int(n) for n in shares(micro_batches, first, each)]
        for _ in range(MOVES):
            slowest = max(range(number), key=lambda p: (self.end(p, counts[p]), -p))
            now = self.end(slowest, counts[slowest])
            others = {k: p for p, k in enumerate(self._alike) if p != slowest}
            taker = (
                min(
                    (p for p in range(number) if p != slowest),
                    key=lambda p: (self.end(p, counts[p] + 1), p),
                    default=slowest,
                )
                if others
                else slowest
            )
            if taker == slowest or self.end(taker, counts[taker] + 1) >= now:
                break
            counts[slowest] -= 1
            counts[taker] += 1
        return counts


def _row(stage: StageCost, lengths: Sequence[int]) -> tuple[float, ...]:
    hops = (0.0 if hop is None else hop.seconds(sum(lengths)) for hop in (stage.ahead, stage.back))
    return (*stage.apart(lengths), *hops)


def form_of(costs: Costs, pipeline: Pipeline) -> object:
    """Return the key that determines a pipeline's seconds: types, rates and links of its ranks."""
    cluster = costs.cluster
    stages = []
    for i, stage in enumerate(pipeline.stages):
        kinds = tuple((cluster.type_of(r), costs.rate(r)) for r in stage.devices)
        following = pipeline.stages[i + 1].devices if i + 1 < len(pipeline.stages) else ()
        near = tuple(cluster.node_of(a) == cluster.node_of(b) for a, b in zip(stage.devices, following, strict=False))
        cards = tuple(cluster.card_of(r) for r in stage.devices)
        stages.append((stage.layers, stage.kind, kinds, near, len(set(cards))))
    return pipeline.rows, tuple(stages)


def share_out(costs: Costs, strategy: Strategy, lengths: Sequence[int], together: int) -> tuple[Assignment, float]:
    """Distribute equal sequences in micro-batches of `together`.

    Args:
        lengths: lengths of all sequences, which are equal.

    Returns:
        the assignment, and the end of its last pipeline without pull, push and update.
    """
    ends = Ends(costs, strategy, lengths[:together])
    counts = ends.counts(-(-len(lengths) // together))
    batches = [tuple(range(i, min(i + together, len(lengths)))) for i in range(0, len(lengths), together)]
    by_pipeline = []
    first = 0
    for count in counts:
        by_pipeline.append(tuple(batches[first : first + count]))
        first += count
    last = max(ends.end(p, count) for p, count in enumerate(counts))
    return Assignment(tuple(by_pipeline), tuple(lengths)), last


def settle(
    costs: Costs, strategy: Strategy, assignment: Assignment, origin: str, expected: float
) -> Settled | Shortage:
    """Walk the memory of a strategy for equal sequences, and choose the owners of the state.

    Args:
        expected: seconds of an iteration.
    """
    found = owners(costs, strategy, assignment)
    if isinstance(found, Shortage):
        return found
    home, memory = found
    return Settled(strategy, home, (assignment,), (expected,), memory, origin, simulated=False)


def simulated(costs: Costs, settled: Settled) -> Settled:
    """Return the plan with simulated seconds."""
    owned = costs.changed(home=settled.home)
    seconds = tuple(owned.simulate(settled.strategy, assignment).seconds for assignment in settled.assignments)
    return replace(settled, by_batch=seconds, simulated=True)


def owners(
    costs: Costs, strategy: Strategy, assignment: Assignment, home: Home | None = None
) -> tuple[Home, tuple[int, ...]] | Shortage:
    """Return the owners of the state, and the resulting peak memory of every rank.

    An owner also holds messages, in proportion to its share: see `_messages`. With stages that stream, the window of
    exchanges limits the messages, so memory is walked with them.

    Args:
        home: fixed owners, if given.
    """
    if strategy.streams:
        return _owners_of_streams(costs, strategy, assignment, home)
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    needed = needs(costs, strategy, assignment)
    lines = _lines(costs, strategy, needed)
    room = [min((limit - held) / per for held, per in two) for limit, two in zip(limits, lines, strict=True)]
    tightest = min(strategy.devices, key=lambda rank: limits[rank] - needed[rank])
    beyond = max(0.0, needed[tightest] - limits[tightest])
    home = None if beyond else home or home_of(costs, strategy, room, costs.home)
    if home is None:
        part = lacking(costs, room, costs.home)
        return Shortage(strategy, tightest, beyond + part * sum(two[0][1] for two in lines) / costs.ranks**2)
    memory = _held(costs, lines, home)
    worst = max(range(costs.ranks), key=lambda rank: memory[rank] / limits[rank])
    if memory[worst] > limits[worst]:
        return Shortage(strategy, worst, memory[worst] - limits[worst])
    return home, memory


def _owners_of_streams(
    costs: Costs, strategy: Strategy, assignment: Assignment, home: Home | None
) -> tuple[Home, tuple[int, ...]] | Shortage:
    """Return the owners of the state for a strategy in which a stage streams; see `owners`."""
    shown = _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment), messages=True)
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    equal = costs.changed(home=Home(copies=costs.home.copies, nodes=costs.home.nodes))
    every = costs.home.copies * state_bytes(costs)
    total = _with_messages(equal, strategy, shown)
    left = [limit - each + equal.owned_bytes(r) for r, (limit, each) in enumerate(zip(limits, total, strict=True))]
    room = [each / every for each in left]
    tightest = min(strategy.devices, key=left.__getitem__)
    beyond = max(0.0, -left[tightest])
    home = None if beyond else home or home_of(costs, strategy, room, costs.home)
    if home is None:
        return Shortage(strategy, tightest, beyond + lacking(costs, room, costs.home) * every / costs.ranks)
    memory = tuple(map(round, _with_messages(costs.changed(home=home), strategy, shown)))
    worst = max(range(costs.ranks), key=lambda rank: memory[rank] / limits[rank])
    if memory[worst] > limits[worst]:
        return Shortage(strategy, worst, memory[worst] - limits[worst])
    return home, memory


def owners_by_block(costs: Costs, strategy: Strategy, assignment: Assignment) -> tuple[Home, tuple[int, ...]] | None:
    """Return owners chosen for each block, and the resulting peak memory of every rank; None if they do not fit.

    Stages that own what they use send and receive less than `owners` plans for, so memory is walked exactly.
    """
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    needed = needs(costs, strategy, assignment)
    per = costs.state_bytes + GRADIENT_BYTES
    room = [(limit - need) / per for limit, need in zip(limits, needed, strict=True)]
    home = home_by_block(costs, strategy, costs.home, room)
    shown = _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment), messages=True)
    memory = tuple(map(round, _with_messages(costs.changed(home=home), strategy, shown)))
    fits = all(total <= limit or not total for total, limit in zip(memory, limits, strict=True))
    return (home, memory) if fits else None


def held(costs: Costs, strategy: Strategy, home: Home, assignments: Sequence[Assignment]) -> tuple[int, ...]:
    """Return the peak bytes of every rank over several mini-batches of varying lengths.

    Pipelines of one shape share one estimate from their largest micro-batches: in the next mini-batch, any of them may
    get what another has in this one.
    """
    everything = [micro_batches_of(strategy, assignment) for assignment in assignments]
    shapes = [pipeline.shape for pipeline in strategy.pipelines]
    largest: dict[object, list[MicroBatch]] = {}
    tokens: dict[object, int] = {}
    for each in everything:
        for pipeline, shape, batches in zip(strategy.pipelines, shapes, each, strict=True):
            most = _largest(batches, _most(pipeline, strategy, strategy.streams))
            few = zip_longest(largest.get(shape, []), most, fillvalue=MicroBatch(0, 0))
            largest[shape] = [MicroBatch(max(a.tokens, b.tokens), max(a.sequences, b.sequences)) for a, b in few]
            tokens[shape] = max(tokens.get(shape, 0), _tokens([batches]))
    every = max(map(_tokens, everything), default=0)
    shown = _DecisiveBatches([largest[s] for s in shapes], [tokens[s] for s in shapes], every)
    if strategy.streams:
        return tuple(map(round, _with_messages(costs.changed(home=home), strategy, shown)))
    return _held(costs, _lines(costs, strategy, _needed(costs, strategy, shown)), home)


def _lines(costs: Costs, strategy: Strategy, needed: Sequence[float]) -> list[tuple[Line, Line]]:
    """Return each rank's memory as a function of its share of the state: at peak activations, and at the end."""
    state = costs.home.copies * state_bytes(costs)
    return [
        ((need, state + beside), (gradients, state + at_end))
        for need, (beside, at_end, gradients) in zip(needed, _messages(costs, strategy), strict=True)
    ]


def _held(costs: Costs, lines: Sequence[tuple[Line, Line]], home: Home) -> tuple[int, ...]:
    owned = [part / home.copies for part in fractions(costs, home)]
    return tuple(round(max(a + part * b for a, b in two)) for part, two in zip(owned, lines, strict=True))


def _messages(costs: Costs, strategy: Strategy) -> list[tuple[float, float, float]]:
    """Return the message bytes of an owner of the whole state, per rank: at peak activations, and at the end.

    The third number is the stage's gradients, in flight at the end. Until the commit an owner cannot know that the
    weights it sent to other stages have arrived. Gradients of later stages arrive from every pipeline while a stage
    computes.
    """
    if costs.ranks == 1:
        return [(0.0, 0.0, 0.0)]
    blocks = costs.outline.blocks
    first = {name: min(costs.outline.index[block] for block in users) for name, users in costs.outline.buckets}
    pulled = np.zeros(len(blocks))
    pushed = np.zeros(len(blocks))
    for bucket in costs.buckets:
        pulled[first[bucket.name]] += costs.sizes.itemsize * bucket.size
        pushed[first[bucket.name]] += GRADIENT_BYTES * bucket.size * bucket.learns
    pipelines = len(strategy.pipelines)
    idle = float(pipelines * (pulled.sum() + pushed.sum()))
    found = [(idle, idle, 0.0)] * costs.ranks
    for pipeline in strategy.pipelines:
        own: dict[tuple[int, ...], list[range]] = {}  # blocks of each group of devices
        for layer, stage in zip(pipeline.first_layers, pipeline.stages, strict=True):
            own.setdefault(stage.devices, []).append(range(*costs.outline.span(layer, layer + stage.layers)))
        for devices, spans in own.items():
            mine = [position for span in spans for position in span]
            sent = pipelines * (pulled.sum() - pulled[mine].sum())
            beside = float(sent + pipelines * pushed[spans[0].stop :].sum())
            at_end = float(sent + pipelines * pushed.sum())
            for rank in devices:
                found[rank] = beside, at_end, float(pushed[mine].sum()) / len(devices)
    return found


@dataclass(frozen=True)
class _DecisiveBatches:
    """The micro-batches that determine a strategy's memory: once a pipeline is full, further ones add only tokens.

    Attributes:
        largest: the largest micro-batches of each pipeline, largest first, enough to fill it.
        tokens: tokens of all micro-batches of each pipeline.
        every: tokens of the mini-batch.
    """

    largest: Sequence[list[MicroBatch]]
    tokens: Sequence[int]
    every: int

    @classmethod
    def of(
        cls, strategy: Strategy, everything: Sequence[Sequence[MicroBatch]], messages: bool = False
    ) -> _DecisiveBatches:
        """Return those of a mini-batch.

        Args:
            messages: whether messages count as well.
        """
        most = [_most(pipeline, strategy, messages) for pipeline in strategy.pipelines]
        largest = [_largest(batches, m) for batches, m in zip(everything, most, strict=True)]
        return cls(largest, [_tokens([batches]) for batches in everything], _tokens(everything))


def needs(costs: Costs, strategy: Strategy, assignment: Assignment) -> list[float]:
    """Return the bytes that each rank needs for its stage, excluding its share of the state and messages."""
    return _needed(costs, strategy, _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment)))


def _needed(costs: Costs, strategy: Strategy, shown: _DecisiveBatches) -> list[float]:
    """Return the bytes of `needs`."""
    # Lost ranks hold no data; all others receive the lengths of all sequences.
    everyone = float(batch_bytes(0, shown.every))
    found = [everyone if math.isfinite(costs.health.rate(r)) else 0.0 for r in range(costs.ranks)]
    if strategy.shares:
        for rank in dict.fromkeys(strategy.devices):
            mine = [p for p, pipeline in enumerate(strategy.pipelines) if rank in pipeline.devices]
            more = sum(shown.tokens[p] for p in mine) - _tokens(shown.largest[p] for p in mine)
            beside = batch_bytes(more, shown.every - _tokens(shown.largest))
            found[rank] = _walked(costs, strategy, shown.largest, rank) + beside
        return found
    known: dict[object, float] = {}
    for pipeline, own, largest in zip(strategy.pipelines, shown.tokens, shown.largest, strict=True):
        alone = Strategy((pipeline,), strategy.schedule)
        for position, stage in enumerate(pipeline.stages):
            few = largest[: telling(strategy.schedule, pipeline.rows, position)]
            # All devices of a stage hold the same amount.
            key = (pipeline.shape, position, tuple(few))
            if key not in known:
                known[key] = _walked(costs, alone, [few], stage.devices[0])
            more = batch_bytes(own - _tokens([few]), shown.every - _tokens([few]))
            for rank in stage.devices:
                found[rank] = known[key] + more
    return found


def _with_messages(costs: Costs, strategy: Strategy, shown: _DecisiveBatches) -> list[float]:
    """Return the bytes that each rank holds, with its share of the state and messages.

    Ranks in equal places that own equally many elements of every bucket are walked once, unless there are second
    owners: a weight comes from the nearer one.
    """
    shapes = [(p.shape, tuple(few)) for p, few in zip(strategy.pipelines, shown.largest, strict=True)]
    places_of: dict[int, list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(strategy.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for rank in stage.devices:
                places_of.setdefault(rank, []).append((p, s))
    homes = [costs.home_of(bucket) for bucket in costs.buckets]
    different = list({id(home): home for home in homes}.values())
    known: dict[object, float] = {}
    found = []
    for rank in range(costs.ranks):
        if rank in costs.health.lost:
            found.append(0.0)
            continue
        places = places_of.get(rank, [])
        owned = tuple(home.local_size(rank) for home in different)
        key = (tuple((shapes[p], s) for p, s in places), owned, rank if costs.home.copies > 1 else None)
        if key not in known:
            known[key] = float(costs.walk(strategy, shown.largest, rank).peak().total)
        more = sum(shown.tokens[p] - _tokens([shown.largest[p]]) for p in dict.fromkeys(p for p, _ in places))
        found.append(known[key] + batch_bytes(more, shown.every - _tokens(shown.largest)))
    return found


def _most(pipeline: Pipeline, strategy: Strategy, messages: bool) -> int | None:
    """Return the number of micro-batches that determines the peak of every stage of a pipeline; None: all."""
    # Every rank enters the exchanges of all pipelines, and messages outlive the micro-batch that sent them.
    every = strategy.pipelines if messages else (pipeline,)
    counts = [telling(strategy.schedule, p.rows, position) for p in every for position in range(len(p.stages))]
    return None if None in counts else max(count for count in counts if count is not None) + messages


def _tokens(batches: Iterable[Sequence[MicroBatch]]) -> int:
    return sum(m.tokens for each in batches for m in each)


def _walked(costs: Costs, strategy: Strategy, batches: Sequence[Sequence[MicroBatch]], rank: int) -> float:
    walk = costs.walk(strategy, batches, rank, messages=False)
    at_home = walk.at_home
    return float(walk.peak().total - at_home.state - at_home.shard)


def _largest(batches: Sequence[MicroBatch], most: int | None) -> list[MicroBatch]:
    """Return the `most` largest micro-batches (None: all), largest first.

    With fewer micro-batches than `most`, the largest is repeated: a run cuts every mini-batch by what fits in a full
    pipeline (`Costs.max_len`), so it would reject a plan that fits only when the pipeline is not full.
    """
    found = sorted(batches, key=lambda m: (-m.tokens, -m.sequences))[:most]
    return found[:1] * ((most or 0) - len(found)) + found

"""Conversion of a search candidate to a runnable strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import zip_longest

import numpy as np

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.compiled_replay import AHEAD
from hydragraph.cost.costs import Costs
from hydragraph.cost.exchanges import ring_pairs
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.pricing import micro_batches_of
from hydragraph.cost.rank_memory import batch_bytes, micro_batches_until_peak
from hydragraph.cost.schedule_replay import replayed
from hydragraph.cost.stage_costs import stage_rows
from hydragraph.planner.assignment.equal_sequences import rebalance
from hydragraph.planner.generators.device_groups import Group, GroupForm, runs
from hydragraph.planner.generators.group_prices import state_bytes
from hydragraph.planner.generators.pipeline_shares import shares
from hydragraph.planner.generators.pipelines_of_groups import Partition, PipelineLayout, PipelinePricing, pipeline_of
from hydragraph.planner.state_shares import fractions, home_by_block, home_of, lacking
from hydragraph.planner.traffic_bound import bytes_by_block
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy

Line = tuple[float, float]

STREAMED_ROUNDS = 5
MOVES = 64
# Usable fraction of memory.
NEAR_LIMIT = 0.99


@dataclass(frozen=True)
class Candidate:
    """A strategy that may be the best for equal sequences.

    Attributes:
        together: sequences per micro-batch.
        across: variant whose pipelines span many nodes, if different from `strategy`.
        exposed_s: longest time for which a pipeline waits for pull and push.
        assignment: assignment that takes `seconds`, if known.
    """

    strategy: Strategy
    origin: str
    seconds: float
    together: int = 1
    across: Strategy | None = None
    exposed_s: float = 0.0
    assignment: Assignment | None = None


@dataclass(frozen=True)
class SearchCandidate:
    """A search result, whose pipelines consist of groups.

    Attributes:
        layout: layout of each kind of pipeline; default: by `bench.lay`.
    """

    bench: PipelinePricing
    partition: Partition
    groups: tuple[Group, ...]
    together: int
    origin: str
    layout: tuple[PipelineLayout, ...] | None = None

    @property
    def seconds(self) -> float:
        return self.partition.seconds

    @property
    def shape(self) -> object:
        """Key of similar candidates: numbers of stages, groups' types and degrees, and `together`."""
        depths = Counter(len(multiset) for multiset, n in self.partition.pipelines for _ in range(n))
        forms = Counter((form.site.type, form.tp) for form in self.bench.forms)
        return frozenset(depths.items()), frozenset(forms), self.together

    def laid_by_kind(self) -> Sequence[PipelineLayout]:
        count = max(1, round(self.bench.micro_batches / self.partition.count))
        return self.layout or [self.bench.lay(multiset, count) for multiset, _ in self.partition.pipelines]

    def laid(self) -> list[PipelineLayout]:
        kinds = zip(self.laid_by_kind(), self.partition.pipelines, strict=True)
        return [layout for layout, (_, times) in kinds for _ in range(times)]


def unlike(candidates: Iterable[SearchCandidate]) -> list[SearchCandidate]:
    """Return the first candidate of each shape."""
    first: dict[object, SearchCandidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.shape, candidate)
    return list(first.values())


@dataclass(frozen=True)
class PricedPlan:
    """A runnable strategy, its home (owners of the state) and its assignments.

    Attributes:
        by_batch: each mini-batch's seconds, infinite if it does not fit.
        memory: peak bytes of every rank.
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
        return math.fsum(self.by_batch) / len(self.by_batch)


@dataclass(frozen=True)
class Shortage:
    """A strategy that does not fit; `rank` has the largest shortage of memory and needs `bytes` more."""

    strategy: Strategy
    rank: int
    bytes: float

    def __str__(self) -> str:
        return f"rank {self.rank} needs {self.bytes / 1e9:.3g} GB more memory"


def placed_candidates(found: Iterable[SearchCandidate]) -> list[Candidate]:
    """Place search results' pipelines on devices; return the most promising first."""
    candidates = []
    for each in sorted(found, key=lambda each: each.seconds):
        laid = each.laid()
        index = {form: i for i, form in enumerate(each.bench.forms)}
        every = (placed(laid, each.groups, index, by_stage) for by_stage in (False, True))
        within, across = (Strategy(tuple(sorted(some, key=lambda pipeline: min(pipeline.devices)))) for some in every)
        exposed_s = max(layout.exposed_s + more for layout, more in zip(laid, each.bench.awaited(laid), strict=True))
        different = None if across == within else across
        candidates.append(Candidate(within, each.origin, each.seconds, each.together, different, exposed_s))
    return candidates


def placed(
    laid: Sequence[PipelineLayout], groups: Iterable[Group], index: Mapping[GroupForm, int], by_stage: bool = False
) -> list[Pipeline]:
    """Return pipelines of groups.

    If `by_stage`, all first stages get the first groups, else the first pipeline does.
    """
    waiting: dict[int, list[Group]] = {}
    for group in groups:
        waiting.setdefault(index[group.form], []).append(group)
    places = [(p, s) for p, layout in enumerate(laid) for s in range(len(layout.order))]
    if by_stage:
        places.sort(key=lambda place: (place[1], place[0]))
    chosen: dict[tuple[int, int], Group] = {}
    for p, s in places:
        chosen[p, s] = waiting[laid[p].order[s]].pop(0)
    return [
        pipeline_of((chosen[p, s].devices for s in range(len(layout.order))), layout.layers, layout.kinds)
        for p, layout in enumerate(laid)
    ]


def form_of(costs: Costs, pipeline: Pipeline) -> object:
    """Return a key that is equal for pipelines with equal times."""
    cluster = costs.cluster
    stages = []
    for i, stage in enumerate(pipeline.stages):
        kinds = tuple((cluster.type_of(r), costs.rate(r)) for r in stage.devices)
        following = pipeline.stages[i + 1].devices if i + 1 < len(pipeline.stages) else ()
        hops = list(zip(stage.devices, following, strict=False))
        near = tuple(cluster.node_of(a) == cluster.node_of(b) for a, b in hops)
        ring = ring_pairs(stage.devices) if stage.tp > 1 else []
        links = frozenset(cluster.link(*pair) for pair in ring), frozenset(cluster.link(*pair) for pair in hops)
        cards = tuple(cluster.card_of(r) for r in stage.devices)
        stages.append((stage.layers, stage.kind, kinds, near, links, len(set(cards))))
    return pipeline.rows, tuple(stages)


def share_out(costs: Costs, strategy: Strategy, lengths: Sequence[int], together: int) -> tuple[Assignment, float]:
    """Distribute equal sequences over pipelines in micro-batches of `together` sequences.

    Also return the last pipeline's end time without pull, push and update.
    """
    forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
    pipelines = dict(zip(forms, strategy.pipelines, strict=True))
    rows = {form: stage_rows(costs.stages(p), [lengths[:together]]) for form, p in pipelines.items()}

    @cache
    def end_of(form: object, count: int) -> float:
        return float(replayed(rows[form], strategy.schedule, pipelines[form].rows, [0] * count).max())

    def end(pipeline: int, count: int) -> float:
        return end_of(forms[pipeline], count)

    every = range(len(forms))
    first = np.array([end(p, 1) for p in every])
    further = np.array([rows[form][0, :, :AHEAD].sum(axis=1).max() for form in forms])
    counts = shares(-(-len(lengths) // together), first, further).tolist()
    rebalance(counts, end, every, 0.0, MOVES)
    batches = [tuple(range(i, min(i + together, len(lengths)))) for i in range(0, len(lengths), together)]
    assignment = Assignment(tuple(runs(batches, counts)), tuple(lengths))
    return assignment, max(end(p, count) for p, count in enumerate(counts))


def settle(
    costs: Costs, strategy: Strategy, assignment: Assignment, origin: str, expected: float
) -> PricedPlan | Shortage:
    choice = owners(costs, strategy, assignment)
    if isinstance(choice, Shortage) and not (strategy.streams or strategy.shares):
        choice = owners_by_block(costs, strategy, assignment) or choice
    if isinstance(choice, Shortage):
        return choice
    home, memory = choice
    return PricedPlan(strategy, home, (assignment,), (expected,), memory, origin, simulated=False)


def simulated(costs: Costs, settled: PricedPlan) -> PricedPlan:
    owned = costs.changed(home=settled.home)
    seconds = tuple(owned.simulate(settled.strategy, assignment).seconds for assignment in settled.assignments)
    return replace(settled, by_batch=seconds, simulated=True)


def owners(
    costs: Costs, strategy: Strategy, assignment: Assignment, home: Home | None = None
) -> tuple[Home, tuple[int, ...]] | Shortage:
    """Choose owners of the state; return the home and every rank's peak memory.

    If stages stream, only some messages are in memory at a time, so memory is found by walking through the
    instructions.
    """
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    state = costs.home.copies * state_bytes(costs)
    decisive: _DecisiveBatches | None = None
    lines: list[tuple[Line, Line]] = []
    if strategy.streams:
        decisive = _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment), messages=True)
        equal = costs.changed(home=Home(copies=costs.home.copies, nodes=costs.home.nodes))
        total = _walked_whole(equal, strategy, decisive)
        left = [limit - peak + equal.owned_bytes(r) for r, (limit, peak) in enumerate(zip(limits, total, strict=True))]
        room = [free_bytes / state for free_bytes in left]
        lacked = state / costs.ranks
    else:
        needed = needs(costs, strategy, assignment)
        lines = _lines(costs, strategy, needed)
        left = [limit - need for limit, need in zip(limits, needed, strict=True)]
        room = [min((limit - fixed) / per for fixed, per in two) for limit, two in zip(limits, lines, strict=True)]
        lacked = sum(two[0][1] for two in lines) / costs.ranks**2
    tightest = min(strategy.devices, key=left.__getitem__)
    beyond = max(0.0, -left[tightest])
    home = None if beyond else home or home_of(costs, strategy, room, costs.home)
    if home is None:
        return Shortage(strategy, tightest, beyond + lacking(costs, room, costs.home) * lacked)
    if decisive is not None:
        memory = _walked_whole(costs.changed(home=home), strategy, decisive)
    else:
        memory = _held(costs, lines, home)
    worst = max(range(costs.ranks), key=lambda rank: memory[rank] / limits[rank])
    if memory[worst] > limits[worst]:
        return Shortage(strategy, worst, memory[worst] - limits[worst])
    return home, memory


def owners_by_block(
    costs: Costs, strategy: Strategy, assignment: Assignment, worth: Callable[[Home], bool] = lambda home: True
) -> tuple[Home, tuple[int, ...]] | None:
    """Choose owners of each block; return the home and every rank's peak memory, or None if no home is `worth` pricing
    and fits.

    If stages stream, ranks with too little memory get smaller shares.
    """
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    needed = needs(costs, strategy, assignment)
    per = costs.state_bytes + GRADIENT_BYTES
    decisive = _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment), messages=True)
    for _ in range(STREAMED_ROUNDS if strategy.streams else 1):
        room = [(limit - need) / per for limit, need in zip(limits, needed, strict=True)]
        if strategy.streams and (min(room) < 0 or sum(room) * per < costs.home.copies * state_bytes(costs)):
            break
        home = home_by_block(costs, strategy, costs.home, room)
        if not worth(home):
            break
        memory = _walked_whole(costs.changed(home=home), strategy, decisive)
        if all(total <= limit or not total for total, limit in zip(memory, limits, strict=True)):
            return home, memory
        needed = [need + max(0, m - limit) for need, m, limit in zip(needed, memory, limits, strict=True)]
    return None


def held(costs: Costs, strategy: Strategy, home: Home, assignments: Sequence[Assignment]) -> tuple[int, ...]:
    """Return every rank's peak bytes over mini-batches.

    Every pipeline is assumed to get the largest micro-batches of any pipeline with the same shape.
    """
    # `_lines` reserves memory for messages of ranks that share all blocks' state.
    messages = bool(strategy.streams or home.buckets)
    everything = [micro_batches_of(strategy, assignment) for assignment in assignments]
    shapes = [pipeline.shape for pipeline in strategy.pipelines]
    largest: dict[object, list[MicroBatch]] = {}
    tokens: dict[object, int] = {}
    for mini_batch in everything:
        for pipeline, shape, batches in zip(strategy.pipelines, shapes, mini_batch, strict=True):
            most = _largest(batches, _most(pipeline, strategy, messages))
            few = zip_longest(largest.get(shape, []), most, fillvalue=MicroBatch(0, 0))
            largest[shape] = [MicroBatch(max(a.tokens, b.tokens), max(a.sequences, b.sequences)) for a, b in few]
            tokens[shape] = max(tokens.get(shape, 0), _tokens([batches]))
    every = max(map(_tokens, everything), default=0)
    decisive = _DecisiveBatches([largest[s] for s in shapes], [tokens[s] for s in shapes], every)
    if messages:
        return _walked_whole(costs.changed(home=home), strategy, decisive)
    return _held(costs, _lines(costs, strategy, _needed(costs, strategy, decisive)), home)


def _lines(costs: Costs, strategy: Strategy, needed: Sequence[float]) -> list[tuple[Line, Line]]:
    state = costs.home.copies * state_bytes(costs)
    return [
        ((need, state + beside), (gradients, state + at_end))
        for need, (beside, at_end, gradients) in zip(needed, _messages(costs, strategy), strict=True)
    ]


def _held(costs: Costs, lines: Sequence[tuple[Line, Line]], home: Home) -> tuple[int, ...]:
    owned = [part / home.copies for part in fractions(costs, home)]
    return tuple(round(max(a + part * b for a, b in two)) for part, two in zip(owned, lines, strict=True))


def _messages(costs: Costs, strategy: Strategy) -> list[tuple[float, float, float]]:
    """Return each rank's message bytes (as if it owned all state) at the peak and at the end, and its gradient bytes.

    Sent weights stay in the owner's memory until the commit. Gradients of later stages arrive while the owner computes.
    """
    if costs.ranks == 1:
        return [(0.0, 0.0, 0.0)]
    pulled, pushed = bytes_by_block(costs)
    pipelines = len(strategy.pipelines)
    idle = float(pipelines * (pulled.sum() + pushed.sum()))
    messages = [(idle, idle, 0.0)] * costs.ranks
    for pipeline in strategy.pipelines:
        own: dict[tuple[int, ...], list[range]] = {}
        for layer, stage in zip(pipeline.first_layers, pipeline.stages, strict=True):
            own.setdefault(stage.devices, []).append(range(*costs.outline.span(layer, layer + stage.layers)))
        for devices, spans in own.items():
            mine = [position for span in spans for position in span]
            sent = pipelines * (pulled.sum() - pulled[mine].sum())
            beside = float(sent + pipelines * pushed[spans[0].stop :].sum())
            at_end = float(sent + pipelines * pushed.sum())
            for rank in devices:
                messages[rank] = beside, at_end, float(pushed[mine].sum()) / len(devices)
    return messages


@dataclass(frozen=True)
class _DecisiveBatches:
    """Micro-batches that determine memory: if a pipeline is full, further micro-batches add only their tokens' bytes.

    Attributes:
        largest: for each pipeline, as many of its largest micro-batches as fill it.
        tokens, every: tokens of each pipeline, and of the mini-batch.
    """

    largest: Sequence[list[MicroBatch]]
    tokens: Sequence[int]
    every: int

    @classmethod
    def of(
        cls, strategy: Strategy, everything: Sequence[Sequence[MicroBatch]], messages: bool = False
    ) -> _DecisiveBatches:
        most = [_most(pipeline, strategy, messages) for pipeline in strategy.pipelines]
        largest = [_largest(batches, m) for batches, m in zip(everything, most, strict=True)]
        return cls(largest, [_tokens([batches]) for batches in everything], _tokens(everything))


@lru_cache(64)
def needs(costs: Costs, strategy: Strategy, assignment: Assignment) -> Sequence[float]:
    """Return each rank's peak bytes, excluding state and messages."""
    return _needed(costs, strategy, _DecisiveBatches.of(strategy, micro_batches_of(strategy, assignment)))


def _needed(costs: Costs, strategy: Strategy, decisive: _DecisiveBatches) -> list[float]:
    everyone = float(batch_bytes(0, decisive.every))
    bytes_by_rank = [everyone if math.isfinite(costs.health.rate(r)) else 0.0 for r in range(costs.ranks)]
    if strategy.shares:
        for rank in dict.fromkeys(strategy.devices):
            mine = [p for p, pipeline in enumerate(strategy.pipelines) if rank in pipeline.devices]
            more = sum(decisive.tokens[p] for p in mine) - _tokens(decisive.largest[p] for p in mine)
            beside = batch_bytes(more, decisive.every - _tokens(decisive.largest))
            bytes_by_rank[rank] = _walked(costs, strategy, decisive.largest, rank) + beside
        return bytes_by_rank
    walked_bytes: dict[object, float] = {}
    for pipeline, own, largest in zip(strategy.pipelines, decisive.tokens, decisive.largest, strict=True):
        alone = Strategy((pipeline,), strategy.schedule)
        for position, stage in enumerate(pipeline.stages):
            few = largest[: micro_batches_until_peak(strategy.schedule, pipeline.rows, position)]
            key = (pipeline.shape, position, tuple(few))
            if key not in walked_bytes:
                walked_bytes[key] = _walked(costs, alone, [few], stage.devices[0])
            more = batch_bytes(own - _tokens([few]), decisive.every - _tokens([few]))
            for rank in stage.devices:
                bytes_by_rank[rank] = walked_bytes[key] + more
    return bytes_by_rank


def _walked_whole(costs: Costs, strategy: Strategy, decisive: _DecisiveBatches) -> tuple[int, ...]:
    shapes = [(p.shape, tuple(few)) for p, few in zip(strategy.pipelines, decisive.largest, strict=True)]
    places_of: dict[int, list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(strategy.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for rank in stage.devices:
                places_of.setdefault(rank, []).append((p, s))
    homes = [costs.home_of(bucket) for bucket in costs.buckets]
    different = list({id(home): home for home in homes}.values())
    walked_bytes: dict[object, int] = {}
    bytes_by_rank: list[int] = []
    for rank in range(costs.ranks):
        if rank in costs.health.lost:
            bytes_by_rank.append(0)
            continue
        places = places_of.get(rank, [])
        owned = tuple(home.local_size(rank) for home in different)
        key = (tuple((shapes[p], s) for p, s in places), owned, rank if costs.home.copies > 1 else None)
        if key not in walked_bytes:
            walked_bytes[key] = costs.walk(strategy, decisive.largest, rank).peak().total
        more = sum(decisive.tokens[p] - _tokens([decisive.largest[p]]) for p in dict.fromkeys(p for p, _ in places))
        bytes_by_rank.append(walked_bytes[key] + batch_bytes(more, decisive.every - _tokens(decisive.largest)))
    return tuple(bytes_by_rank)


def _most(pipeline: Pipeline, strategy: Strategy, messages: bool) -> int | None:
    every = strategy.pipelines if messages else (pipeline,)
    positions = [(p.rows, position) for p in every for position in range(len(p.stages))]
    counts = [micro_batches_until_peak(strategy.schedule, rows, position) for rows, position in positions]
    return None if None in counts else max(count for count in counts if count is not None) + messages


def _tokens(batches: Iterable[Sequence[MicroBatch]]) -> int:
    return sum(m.tokens for pipeline_batches in batches for m in pipeline_batches)


def _walked(costs: Costs, strategy: Strategy, batches: Sequence[Sequence[MicroBatch]], rank: int) -> float:
    walk = costs.walk(strategy, batches, rank, messages=False)
    return float(walk.peak().total - walk.at_home.home)


def _largest(batches: Sequence[MicroBatch], most: int | None) -> list[MicroBatch]:
    largest = sorted(batches, key=lambda m: (-m.tokens, -m.sequences))[:most]
    return largest[:1] * ((most or 0) - len(largest)) + largest

"""From a candidate of the search to what can run: ranks in their places, sequences shared out, exact seconds, memory.

The search goes by forms of groups and mean layers. Here groups become ranks again, micro-batches are shared out by the
exact 1F1B recurrence with messages between stages, memory is walked (`cost.memory.Walk`), the state gets its owners.
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
from hydragraph.cost.costs import Costs, micro_batches_of
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.rank_memory import batch_bytes, telling
from hydragraph.cost.stage_arrays import end_of, scratch_of
from hydragraph.cost.stage_costs import StageCost, stages_end
from hydragraph.planner.generators.device_groups import Group
from hydragraph.planner.generators.group_prices import state_bytes
from hydragraph.planner.generators.pipeline_shares import shares
from hydragraph.planner.generators.pipelines_of_groups import Bench, Laid, Partition
from hydragraph.planner.state_shares import fractions, home_by_block, home_of, lacking
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Pipeline, Stage, Strategy

Line = tuple[float, float]  # bytes, and bytes of all that can be owned

# Micro-batches that are moved between pipelines at most, beyond the first sharing.
MOVES = 64
# Of a device's memory, what may be planned to be held: walks with messages seldom hold more than is said here.
NEAR_LIMIT = 0.99


@dataclass(frozen=True)
class Candidate:
    """What the search found: pipelines of forms.

    Attributes:
        bench: that priced it.
        partition: which forms make which pipelines.
        groups: of ranks, of these forms.
        together: sequences in a micro-batch.
        origin: which way of searching it came from.
        layout: each kind of pipeline, where it is not laid as the bench lays it.
    """

    bench: Bench
    partition: Partition
    groups: tuple[Group, ...]
    together: int
    origin: str
    layout: tuple[Laid, ...] | None = None

    @property
    def seconds(self) -> float:
        """What the search expects."""
        return self.partition.seconds

    @property
    def shape(self) -> object:
        """What candidates that are much alike have in common: degrees, and how many pipelines of how many stages."""
        depths = Counter(len(multiset) for multiset, n in self.partition.pipelines for _ in range(n))
        forms = Counter((form.site.type, form.tp) for form in self.bench.forms)
        return frozenset(depths.items()), frozenset(forms), self.together

    def laid(self) -> list[Laid]:
        """Return every pipeline as the search laid it."""
        count = max(1, round(self.bench.micro_batches / self.partition.count))
        layout = self.layout or [self.bench.lay(m, count) for m, _ in self.partition.pipelines]
        return [each for each, (_, times) in zip(layout, self.partition.pipelines, strict=True) for _ in range(times)]

    def exposed_s(self) -> float:
        """Return what of pull and push nothing hides, on the pipeline where that is most."""
        laid = self.laid()
        return max(each.exposed_s + more for each, more in zip(laid, self.bench.awaited(laid), strict=True))


@dataclass(frozen=True)
class Settled:
    """A strategy that runs, and all that is known of it.

    Attributes:
        strategy, home: what runs.
        assignments: of each mini-batch.
        by_batch: seconds of each; infinite where it cannot take the longest sequence.
        memory: bytes of every rank when it holds most.
        origin: see `Candidate`.
        simulated: whether the seconds are those of a simulation, rather than its slowest pipeline and an estimate of
            what traffic adds.
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
        """Of an iteration, on average."""
        return math.fsum(self.by_batch) / len(self.by_batch)


@dataclass(frozen=True)
class Shortage:
    """A strategy that does not fit: which rank lacks most, and how many bytes."""

    strategy: Strategy
    rank: int
    bytes: float

    def __str__(self) -> str:
        return f"rank {self.rank} lacks {self.bytes / 1e9:.3g} GB"


def strategies_of(candidate: Candidate) -> list[Strategy]:
    """Return the candidate's pipelines on ranks: each within as few nodes as can be, and each across nodes."""
    laid = candidate.laid()
    found = [_placed(candidate, laid, by_stage=False)]
    across = _placed(candidate, laid, by_stage=True)
    return found if across == found[0] else [found[0], across]


def _placed(candidate: Candidate, laid: Sequence[Laid], by_stage: bool) -> Strategy:
    """Give ranks to stages, pipeline by pipeline or stage by stage."""
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
    # The same strategy however the search came upon it.
    return Strategy(tuple(sorted(pipelines, key=lambda pipeline: min(pipeline.devices))))


class Ends:
    """When pipelines end that run so many equal micro-batches, exactly; equal pipelines are computed once."""

    def __init__(self, costs: Costs, strategy: Strategy, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._schedule = strategy.schedule
        self._parts: list[tuple[StageCost, ...]] = []
        self._rows: list[NDArray[np.float64]] = []  # what a micro-batch takes, by stage, as `end_of` asks for it
        self._alike: list[int] = []
        known: dict[object, int] = {}
        for pipeline in strategy.pipelines:
            form = form_of(costs, pipeline)
            if form not in known:
                known[form] = len(self._parts)
                parts = costs.stages(pipeline)
                self._parts.append(parts)
                self._rows.append(np.array([[_row(stage, self._lengths) for stage in parts]]))
            self._alike.append(known[form])
        self._ends: dict[tuple[int, int], float] = {}

    def end(self, pipeline: int, count: int) -> float:
        """Return when a pipeline has run so many micro-batches."""
        key = (self._alike[pipeline], count)
        if key not in self._ends:
            self._ends[key] = self._end(*key)
        return self._ends[key]

    def _end(self, kind: int, count: int) -> float:
        parts = self._parts[kind]
        if any(stage.ahead is not None and stage.ahead.blocking for stage in parts):
            return stages_end(parts, [self._lengths] * count, self._schedule)
        order = np.zeros(count, np.int64)
        scratch = scratch_of(len(parts), count)
        return float(end_of(self._rows[kind], order, count, len(parts), self._schedule == "gpipe", scratch))

    def counts(self, micro_batches: int) -> list[int]:
        """Return how many micro-batches each pipeline runs, so that the last one ends first."""
        number = len(self._alike)
        # A pipeline that has filled ends with each further micro-batch one step of its slowest stage later.
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
    """Return what decides a pipeline's seconds: types, rates and links of ranks. Those of one form are priced once."""
    cluster = costs.cluster
    stages = []
    for i, stage in enumerate(pipeline.stages):
        kinds = tuple((cluster.type_of(r), costs.rate(r)) for r in stage.devices)
        following = pipeline.stages[i + 1].devices if i + 1 < len(pipeline.stages) else ()
        near = tuple(cluster.node_of(a) == cluster.node_of(b) for a, b in zip(stage.devices, following, strict=False))
        cards = tuple(cluster.card_of(r) for r in stage.devices)
        stages.append((stage.layers, stage.kind, kinds, near, len(set(cards))))
    return tuple(stages)


def share_out(costs: Costs, strategy: Strategy, lengths: Sequence[int], together: int) -> tuple[Assignment, float]:
    """Share out equal sequences in micro-batches of so many.

    Args:
        lengths: of all sequences, equal ones.

    Returns:
        the assignment, and when its last pipeline ends, beside pull, push and update.
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
    """Walk the memory of a strategy for equal sequences, and give the state its owners.

    Args:
        expected: seconds of an iteration.
    """
    found = owners(costs, strategy, assignment)
    if isinstance(found, Shortage):
        return found
    home, memory = found
    return Settled(strategy, home, (assignment,), (expected,), memory, origin, simulated=False)


def simulated(costs: Costs, settled: Settled) -> Settled:
    """Return it with the seconds of a simulation."""
    owned = costs.changed(home=settled.home)
    seconds = tuple(owned.simulate(settled.strategy, assignment).seconds for assignment in settled.assignments)
    return replace(settled, by_batch=seconds, simulated=True)


def owners(
    costs: Costs, strategy: Strategy, assignment: Assignment, home: Home | None = None
) -> tuple[Home, tuple[int, ...]] | Shortage:
    """Return who owns the state, and what every rank then holds when it holds most.

    An owner also holds messages, in proportion to what it owns: see `_messages`.

    Args:
        home: who owns it, where that is given.
    """
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    needed = needs(costs, strategy, assignment)
    lines = _lines(costs, strategy, needed)
    room = [min((limit - held) / per for held, per in two) for limit, two in zip(limits, lines, strict=True)]
    tightest = min(strategy.devices, key=lambda rank: limits[rank] - needed[rank])
    if limits[tightest] < needed[tightest]:
        return Shortage(strategy, tightest, needed[tightest] - limits[tightest])
    home = home or home_of(costs, strategy, room, costs.home)
    if home is None:
        part = lacking(costs, room, costs.home)
        return Shortage(strategy, tightest, part * sum(two[0][1] for two in lines) / costs.ranks**2)
    memory = _held(costs, lines, home)
    worst = max(range(costs.ranks), key=lambda rank: memory[rank] / limits[rank])
    if memory[worst] > limits[worst]:
        return Shortage(strategy, worst, memory[worst] - limits[worst])
    return home, memory


def owners_by_block(costs: Costs, strategy: Strategy, assignment: Assignment) -> tuple[Home, tuple[int, ...]] | None:
    """Return owners that are chosen for each block, and what every rank then holds; None where that is too much.

    Stages that own what they use send and receive less than `owners` plans for, so memory is walked exactly.
    """
    limits = [NEAR_LIMIT * costs.memory_of(rank) for rank in range(costs.ranks)]
    needed = needs(costs, strategy, assignment)
    per = costs.state_bytes + GRADIENT_BYTES
    room = [(limit - need) / per for limit, need in zip(limits, needed, strict=True)]
    home = home_by_block(costs, strategy, costs.home, room)
    memory = tuple(each.total for each in costs.changed(home=home).memory(strategy, assignment))
    fits = all(total <= limit or not total for total, limit in zip(memory, limits, strict=True))
    return (home, memory) if fits else None


def held(costs: Costs, strategy: Strategy, home: Home, assignments: Sequence[Assignment]) -> tuple[int, ...]:
    """Return the bytes that every rank holds when it holds most, of several mini-batches of varying lengths.

    It is told in one for pipelines of one shape, whose largest micro-batches are taken together: the next mini-batch
    may give any of them what one has in this.
    """
    everything = [micro_batches_of(strategy, assignment) for assignment in assignments]
    shapes = [tuple((s.layers, s.kind) for s in pipeline.stages) for pipeline in strategy.pipelines]
    largest: dict[object, list[MicroBatch]] = {}
    tokens: dict[object, int] = {}
    for each in everything:
        for shape, batches in zip(shapes, each, strict=True):
            most = _largest(batches, _most(len(shape), strategy.schedule))
            few = zip_longest(largest.get(shape, []), most, fillvalue=MicroBatch(0, 0))
            largest[shape] = [MicroBatch(max(a.tokens, b.tokens), max(a.sequences, b.sequences)) for a, b in few]
            tokens[shape] = max(tokens.get(shape, 0), _tokens([batches]))
    every = max(map(_tokens, everything), default=0)
    needed = _needed(costs, strategy, [largest[s] for s in shapes], [tokens[s] for s in shapes], every)
    return _held(costs, _lines(costs, strategy, needed), home)


def _lines(costs: Costs, strategy: Strategy, needed: Sequence[float]) -> list[tuple[Line, Line]]:
    """Return what every rank holds by the part of the state that it owns: with most activations, and at the end."""
    state = costs.home.copies * state_bytes(costs)
    return [
        ((need, state + beside), (gradients, state + at_end))
        for need, (beside, at_end, gradients) in zip(needed, _messages(costs, strategy), strict=True)
    ]


def _held(costs: Costs, lines: Sequence[tuple[Line, Line]], home: Home) -> tuple[int, ...]:
    owned = [part / home.copies for part in fractions(costs, home)]
    return tuple(round(max(a + part * b for a, b in two)) for part, two in zip(owned, lines, strict=True))


def _messages(costs: Costs, strategy: Strategy) -> list[tuple[float, float, float]]:
    """Return what messages of an owner of all the state would hold, while its stage has most activations and at the
    end, and the stage's gradients, which are then on their way; bytes of every rank.

    Until the commit nobody knows that weights which it sent to other stages have arrived. Gradients of the stages
    behind come while a stage computes, from every pipeline.
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
        done = 0
        for stage in pipeline.stages:
            span = slice(*costs.outline.span(done, done + stage.layers))
            done += stage.layers
            sent = pipelines * (pulled.sum() - pulled[span].sum())
            beside = float(sent + pipelines * pushed[span.stop :].sum())
            at_end = float(sent + pipelines * pushed.sum())
            for rank in stage.devices:
                found[rank] = beside, at_end, float(pushed[span].sum()) / stage.tp
    return found


def needs(costs: Costs, strategy: Strategy, assignment: Assignment) -> list[float]:
    """Return the bytes that each rank needs for its stage, beside its share of the state and messages."""
    everything = micro_batches_of(strategy, assignment)
    # Once a pipeline is full, further equal micro-batches change nothing but the tokens that are there.
    most = [_most(len(pipeline.stages), strategy.schedule) for pipeline in strategy.pipelines]
    shown = [_largest(batches, m) for batches, m in zip(everything, most, strict=True)]
    return _needed(costs, strategy, shown, [_tokens([batches]) for batches in everything], _tokens(everything))


def _needed(
    costs: Costs, strategy: Strategy, shown: Sequence[list[MicroBatch]], tokens: Sequence[int], every: int
) -> list[float]:
    """Return the bytes of `needs`.

    Args:
        shown: the largest micro-batches of each pipeline, largest first, enough to fill it.
        tokens: of all micro-batches of each.
        every: tokens of the mini-batch.
    """
    # Lost ranks hold nothing, the others see how long all sequences are.
    found = [float(batch_bytes(0, every)) if math.isfinite(costs.health.rate(r)) else 0.0 for r in range(costs.ranks)]
    if strategy.shares:
        for rank in dict.fromkeys(strategy.devices):
            mine = [p for p, pipeline in enumerate(strategy.pipelines) if rank in pipeline.devices]
            more = sum(tokens[p] for p in mine) - _tokens(shown[p] for p in mine)
            found[rank] = _walked(costs, strategy, shown, rank) + batch_bytes(more, every - _tokens(shown))
        return found
    known: dict[object, float] = {}
    for pipeline, own, largest in zip(strategy.pipelines, tokens, shown, strict=True):
        shape = tuple((s.layers, s.kind) for s in pipeline.stages)
        alone = Strategy((pipeline,), strategy.schedule)
        for position, stage in enumerate(pipeline.stages):
            # Under GPipe all are in flight at once.
            few = largest[: telling(len(pipeline.stages), position)] if strategy.schedule == "1f1b" else largest
            # All devices hold the same of the same stage.
            key = (shape, position, tuple(few))
            if key not in known:
                known[key] = _walked(costs, alone, [few], stage.devices[0])
            more = batch_bytes(own - _tokens([few]), every - _tokens([few]))
            for rank in stage.devices:
                found[rank] = known[key] + more
    return found


def _most(stages: int, schedule: str) -> int | None:
    """Return how many micro-batches show the most that any stage of a pipeline holds; None: all."""
    return None if schedule != "1f1b" else stages + 2


def _tokens(batches: Iterable[Sequence[MicroBatch]]) -> int:
    return sum(m.tokens for each in batches for m in each)


def _walked(costs: Costs, strategy: Strategy, batches: Sequence[Sequence[MicroBatch]], rank: int) -> float:
    walk = costs.walk(strategy, batches, rank, messages=False)
    at_home = walk.at_home
    return float(walk.peak().total - at_home.state - at_home.shard)


def _largest(batches: Sequence[MicroBatch], most: int | None) -> list[MicroBatch]:
    """Return the largest micro-batches, largest first; so many of them, where that is said.

    Where there are fewer, the largest counts several times: a run cuts every mini-batch by what fits while a pipeline
    is full (`Costs.max_len`), so what would fit only otherwise is refused there.
    """
    found = sorted(batches, key=lambda m: (-m.tokens, -m.sequences))[:most]
    return found[:1] * ((most or 0) - len(found)) + found

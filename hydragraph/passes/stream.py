"""Stream: pull weights one block before a stage uses them, and push gradients as soon as a backward has computed them.

Consecutive users of a bucket share a pull. Every rank enters every exchange (pull or push) in the same order. A
timeline of the iteration, in which all pipelines take equally long, assigns a time to every computation. A pull has the
time of the computation before the first use of the weights, and a push the time of the computation that made the
gradients. At equal times, a rank runs pulls first, then computations, then pushes. A rank therefore waits only for
earlier events and cannot deadlock. Stages that need a bucket at the same time share one exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from hydragraph.ir.instruction import EXCHANGED, Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.schedules.schedule_kinds import schedule_of
from hydragraph.ir.value import Value, ValueKind, gradients, streamed, weights
from hydragraph.passes.bytes_in_flight import windowed
from hydragraph.passes.place import PlacedStage, Placement, stage_buckets

Ranks = tuple[int, ...]


class Computation(NamedTuple):
    op: Op
    block: str
    micro_batch: int


@dataclass(frozen=True)
class Turn:
    """Pull or push that all ranks enter.

    Attributes:
        name: the bucket's name or, if streamed, `BUCKET@INDEX`; unique for each `op`.
        stages: ranks of each stage that uses the bucket.
    """

    op: Op
    bucket: str
    name: str
    stages: tuple[Ranks, ...]
    time: Fraction


@dataclass(frozen=True, eq=False)
class Streaming:
    """Exchanges of an iteration with streaming stages.

    Attributes:
        turns: exchanges, in the order in which every rank enters them.
        times: time of each computation, by stage (its ranks).
        names: name of each bucket's exchange, by stage, computation and operation.
    """

    turns: tuple[Turn, ...]
    times: Mapping[Ranks, Mapping[Computation, Fraction]]
    names: Mapping[tuple[Ranks, Computation, Op], Mapping[str, str]]


def turns(placement: Placement, mode: Mode) -> tuple[Turn, ...]:
    if placement.streams:
        return streaming(placement, mode).turns
    pulls = [Turn(Op.PULL, bucket, bucket, stages, _START) for bucket, stages in placement.holders]
    if mode == "evaluate":
        return tuple(pulls)
    pushed = [turn for turn in reversed(pulls) if turn.bucket not in placement.outline.frozen]
    return (*pulls, *(replace(turn, op=Op.PUSH) for turn in pushed))


def stream(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Add the pulls and pushes of an iteration in which a stage streams."""
    if not placement.streams:
        return program
    found = streaming(placement, mode)
    ranks = placement.peers_of(program.rank)
    waiting = deque(zip(found.turns, exchanges(placement, mode, program.rank), strict=True))
    placed: list[Instruction] = []
    received: list[Instruction] = []
    for instruction in program.instructions:
        # Receives follow the exchanges before the next computation, which the sender may need in
        # order to send.
        if instruction.op is Op.RECEIVE or instruction.target == "aux":
            received.append(instruction)
            continue
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            key = _computation(instruction)
            time = found.times[ranks][key]
            while waiting and _precedes(waiting[0][0], time):
                placed.append(waiting.popleft()[1])
            instruction = _renamed(instruction, found, ranks, key)
        placed += [*received, instruction]
        received = []
    return replace(program, instructions=(*placed, *received, *(exchange for _, exchange in waiting)))


def decides(placement: Placement, mode: Mode, stage: PlacedStage | None) -> Hashable:
    """Return a key that, with a stage's roles and blocks, determines its exchanges."""
    if stage is None or not placement.streams:
        return None
    found = streaming(placement, mode)
    own_turn_numbers = tuple(i for i, turn in enumerate(found.turns) if stage.ranks in turn.stages)
    return own_turn_numbers, tuple(found.times[stage.ranks].values())


def _computation(instruction: Instruction) -> Computation:
    return Computation(instruction.op, instruction.target, instruction.batch)


def _precedes(turn: Turn, time: Fraction) -> bool:
    return turn.time <= time if turn.op is Op.PULL else turn.time < time


def exchanges(placement: Placement, mode: Mode, rank: int) -> list[Instruction]:
    ranks = placement.peers_of(rank)
    every = [_exchange(turn, ranks in turn.stages) for turn in turns(placement, mode)]
    by_op = {op: iter(windowed([e for e in every if e.op is op], placement.outline)) for op in EXCHANGED}
    return [next(by_op[exchange.op]) for exchange in every]


def _exchange(turn: Turn, mine: bool) -> Instruction:
    values = (EXCHANGED[turn.op](turn.name),) if mine else ()
    if turn.op is Op.PULL:
        return Instruction(Op.PULL, turn.name, writes=values)
    return Instruction(Op.PUSH, turn.name, reads=values)


def _renamed(instruction: Instruction, found: Streaming, ranks: Ranks, key: Computation) -> Instruction:
    pulls = found.names[ranks, key, Op.PULL]
    pushes = found.names.get((ranks, key, Op.PUSH), {})

    def renamed(value: Value) -> Value:
        if value.kind is ValueKind.WEIGHTS:
            return weights(pulls[value.bucket])
        return gradients(pushes[value.bucket]) if value.kind is ValueKind.GRADIENTS else value

    return replace(
        instruction, reads=tuple(map(renamed, instruction.reads)), writes=tuple(map(renamed, instruction.writes))
    )


# Before every computation
_START = Fraction(-1)


class _Moment(NamedTuple):
    time: Fraction
    pushes: bool
    place: int
    bucket: str
    streamed: bool


# Computations of a stage that an exchange serves.
_Served = tuple[PlacedStage, tuple[Computation, ...]]


# All ranks share the result
@lru_cache(maxsize=4)
def streaming(placement: Placement, mode: Mode) -> Streaming:
    outline = placement.outline
    times = _times(placement, mode)
    places = {bucket: i for i, bucket in enumerate(outline.pull_order)}
    uses = [use for stage in placement.stages for use in _pulls(outline, stage, times[stage.ranks], places)]
    if mode != "evaluate":
        uses += _pushes(placement, times, places)
    # moments: exchange -> stages that share it, sorted by time, pulls first. numbers: (whether
    # pushes, bucket) -> streamed exchanges so far.
    moments: defaultdict[_Moment, list[_Served]] = defaultdict(list)
    for moment, use in uses:
        moments[moment].append(use)
    numbers: Counter[tuple[bool, str]] = Counter()
    ordered_turns: list[Turn] = []
    names: defaultdict[tuple[Ranks, Computation, Op], dict[str, str]] = defaultdict(dict)
    for moment in sorted(moments):
        op = Op.PUSH if moment.pushes else Op.PULL
        name = moment.bucket
        if moment.streamed:
            name = streamed(moment.bucket, numbers[moment.pushes, moment.bucket])
            numbers[moment.pushes, moment.bucket] += 1
        for stage, served in moments[moment]:
            for computation in served:
                names[stage.ranks, computation, op][moment.bucket] = name
        stages = tuple(stage.ranks for stage, _ in moments[moment])
        ordered_turns.append(Turn(op, moment.bucket, name, stages, moment.time))
    return Streaming(tuple(ordered_turns), times, dict(names))


def _pulls(
    outline: Outline, stage: PlacedStage, times: Mapping[Computation, Fraction], places: Mapping[str, int]
) -> Iterator[tuple[_Moment, _Served]]:
    if not stage.streams_weights:
        for bucket in stage_buckets(outline, stage):
            users = tuple(c for c in times if bucket in outline.weights[c.block])
            yield _Moment(_START, False, places[bucket], bucket, False), (stage, users)
        return
    # before: time of the previous (at first, of the first) computation, when a pull is due.
    # open_pulls: bucket -> (time of its pull, consecutive computations that use it).
    before = next(iter(times.values()))
    open_pulls: dict[str, tuple[Fraction, list[Computation]]] = {}
    for computation, time in times.items():
        needed = outline.weights[computation.block]
        # Buckets that this block does not use are freed; later uses pull them again.
        for bucket in [bucket for bucket in open_pulls if bucket not in needed]:
            begin, served = open_pulls.pop(bucket)
            yield _Moment(begin, False, places[bucket], bucket, True), (stage, tuple(served))
        for bucket in needed:
            open_pulls.setdefault(bucket, (before, []))[1].append(computation)
        before = time
    for bucket, (begin, served) in open_pulls.items():
        yield _Moment(begin, False, places[bucket], bucket, True), (stage, tuple(served))


def _pushes(
    placement: Placement, times: Mapping[Ranks, Mapping[Computation, Fraction]], places: Mapping[str, int]
) -> Iterator[tuple[_Moment, _Served]]:
    outline = placement.outline
    # whole: bucket -> stages that do not stream, which push it once, after their last backward.
    whole: defaultdict[str, list[_Served]] = defaultdict(list)
    for stage in placement.stages:
        backwards = [c for c in times[stage.ranks] if c.op is Op.BACKWARD]
        for computation in backwards if stage.stream else ():
            for bucket in outline.gradients[computation.block]:
                time = times[stage.ranks][computation]
                yield _Moment(time, True, -places[bucket], bucket, True), (stage, (computation,))
        for bucket in () if stage.stream else stage_buckets(outline, stage) - {*outline.frozen}:
            whole[bucket].append((stage, tuple(c for c in backwards if bucket in outline.gradients[c.block])))
    for bucket, uses in whole.items():
        last = max(times[stage.ranks][computation] for stage, served in uses for computation in served)
        for use in uses:
            yield _Moment(last, True, -places[bucket], bucket, False), use


def _times(placement: Placement, mode: Mode) -> Mapping[Ranks, Mapping[Computation, Fraction]]:
    times: dict[Ranks, dict[Computation, Fraction]] = {stage.ranks: {} for stage in placement.stages}
    for group in placement.groups:
        schedule = schedule_of(placement.schedule, group.shape, mode)
        stages = {row: placement.stage_of[ranks[0]] for ranks, row in group.numbers.items()}
        lengths = [[_length(stages[row], a.work) for a in actions] for row, actions in enumerate(schedule.actions)]
        begins = schedule.begins(group.shape.places, lengths)
        for row, stage in stages.items():
            for action, begin, length in zip(schedule.actions[row], begins[row], lengths[row], strict=True):
                op = Op.FORWARD if action.work is Work.FORWARD else Op.BACKWARD
                # Blocks share the time of a forward or backward equally.
                blocks = _blocks(placement.outline, stage, op, action.visit)
                for i, block in enumerate(blocks):
                    times[stage.ranks][Computation(op, block, action.micro_batch)] = begin + i * length / len(blocks)
    return times


def _length(stage: PlacedStage, work: Work) -> Fraction:
    # n micro-batches with v visits each: n v (1 + 2) / (3 n v) = 1 for all stages.
    return Fraction(1 if work is Work.FORWARD else 2, 3 * len(stage.micro_batches) * len(stage.blocks))


def _blocks(outline: Outline, stage: PlacedStage, op: Op, visit: int) -> list[str]:
    first, last = stage.blocks[visit]
    order = range(first, last) if op is Op.FORWARD else reversed(range(max(first, outline.lowest), last))
    return [outline.blocks[k] for k in order]

"""Stream: pull weights just before a stage uses them, and push gradients as soon as a backward has computed them.

A streaming stage pulls a bucket one block before each block that uses it; consecutive blocks that use it share a pull.

Every rank enters every exchange (pull or push), so all ranks need the same order of exchanges. A timeline of the
iteration, in which all pipelines take equally long, assigns a time to every computation. A pull has the time of the
computation before the one that needs the weights. A push has the time of the computation that made the gradients. Each
rank enters a pull before its own computations of that time, and a push after them. Therefore, a rank waits only for
earlier events and cannot deadlock. Stages that need a bucket simultaneously share one exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.value import Value, ValueKind, gradients, streamed, weights
from hydragraph.passes.bytes_in_flight import NAMED, windowed
from hydragraph.passes.place import PlacedStage, Placement, stage_buckets

Ranks = tuple[int, ...]
Task = tuple[Op, int, int]  # operation, micro-batch, visit


class Computation(NamedTuple):
    op: Op
    block: str
    micro_batch: int


@dataclass(frozen=True)
class Turn:
    """Pull or push that all ranks enter.

    Attributes:
        name: the bucket's name or, if streamed, `BUCKET@INDEX`; unique among pulls and among pushes.
        stages: the ranks of every stage that takes part.
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
        turns: exchanges in the order in which every rank enters them.
        times: ranks of a stage -> computation -> time, in the stage's order.
        names: (ranks of a stage, computation, operation) -> bucket -> name of its exchange.
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
    """Add pulls and pushes if a stage of the iteration streams; otherwise, `overlap` adds them."""
    if not placement.streams:
        return program
    exchanges = streaming(placement, mode)
    stage = placement.stage_of.get(program.rank)
    ranks = stage.ranks if stage else ()
    waiting = deque(zip(exchanges.turns, _exchanges(placement.outline, exchanges.turns, ranks), strict=True))
    placed: list[Instruction] = []
    received: list[Instruction] = []
    for instruction in program.instructions:
        if instruction.op is Op.RECEIVE or instruction.target == "aux":
            received.append(instruction)
            continue
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            key = _computation(instruction)
            time = exchanges.times[ranks][key]
            while waiting and _precedes(waiting[0][0], time):
                placed.append(waiting.popleft()[1])
            instruction = _renamed(instruction, exchanges, ranks, key)
        placed += [*received, instruction]
        received = []
    return replace(program, instructions=(*placed, *received, *(exchange for _, exchange in waiting)))


def decides(placement: Placement, mode: Mode, stage: PlacedStage | None) -> Hashable:
    """Return a key that, together with a stage's roles and blocks, determines the stage's exchanges."""
    if stage is None or not placement.streams:
        return None
    exchanges = streaming(placement, mode)
    own_turn_numbers = tuple(i for i, turn in enumerate(exchanges.turns) if stage.ranks in turn.stages)
    return own_turn_numbers, tuple(exchanges.times[stage.ranks].values())


def _computation(instruction: Instruction) -> Computation:
    assert instruction.micro_batch is not None, "a forward or backward needs a micro-batch"
    return Computation(instruction.op, instruction.target, instruction.micro_batch)


def _precedes(turn: Turn, time: Fraction) -> bool:
    return turn.time <= time if turn.op is Op.PULL else turn.time < time


def _exchanges(outline: Outline, found: tuple[Turn, ...], ranks: Ranks) -> Iterator[Instruction]:
    ways: dict[Op, Iterator[Instruction]] = {}
    for op in (Op.PULL, Op.PUSH):
        mine = [_exchange(turn, ranks in turn.stages) for turn in found if turn.op is op]
        ways[op] = iter(windowed(mine, outline))
    for turn in found:
        yield next(ways[turn.op])


def _exchange(turn: Turn, mine: bool) -> Instruction:
    values = (NAMED[turn.op](turn.name),) if mine else ()
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


_START = Fraction(-1)  # before every computation


class _Moment(NamedTuple):
    time: Fraction
    pushes: bool
    place: int  # position in pull or push order
    bucket: str
    streamed: bool


_Uses = list[tuple[PlacedStage, tuple[Computation, ...]]]  # stages and the computations that an exchange serves


def streaming(placement: Placement, mode: Mode) -> Streaming:
    """Return the exchanges of an iteration, computed once for all ranks."""
    if mode not in placement.results:
        placement.results[mode] = _streaming(placement, mode)
    result: Streaming = placement.results[mode]
    return result


def _streaming(placement: Placement, mode: Mode) -> Streaming:
    outline = placement.outline
    times = _times(placement, mode)
    moments: defaultdict[_Moment, _Uses] = defaultdict(list)
    places = {bucket: i for i, bucket in enumerate(outline.pull_order)}
    for stage in placement.stages:
        for time, bucket, served in _pulls(outline, stage, times[stage.ranks]):
            moments[_Moment(time, False, places[bucket], bucket, stage.streams_weights)].append((stage, served))
    if mode != "evaluate":
        for moment, stage, served in _pushes(placement, times, places):
            moments[moment].append((stage, served))
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
    outline: Outline, stage: PlacedStage, times: Mapping[Computation, Fraction]
) -> Iterator[tuple[Fraction, str, tuple[Computation, ...]]]:
    if not stage.streams_weights:
        for bucket in stage_buckets(outline, stage):
            yield _START, bucket, tuple(c for c in times if bucket in outline.weights[c.block])
        return
    order = list(times)
    before = times[order[0]]
    open_pulls: dict[str, tuple[Fraction, list[Computation]]] = {}
    for computation in order:
        needed = outline.weights[computation.block]
        for bucket in [bucket for bucket in open_pulls if bucket not in needed]:
            time, served = open_pulls.pop(bucket)
            yield time, bucket, tuple(served)
        for bucket in needed:
            open_pulls.setdefault(bucket, (before, []))[1].append(computation)
        before = times[computation]
    for bucket, (time, served) in open_pulls.items():
        yield time, bucket, tuple(served)


def _pushes(
    placement: Placement, times: Mapping[Ranks, Mapping[Computation, Fraction]], places: Mapping[str, int]
) -> Iterator[tuple[_Moment, PlacedStage, tuple[Computation, ...]]]:
    outline = placement.outline
    whole: defaultdict[str, list[tuple[PlacedStage, tuple[Computation, ...]]]] = defaultdict(list)
    for stage in placement.stages:
        backwards = [c for c in times[stage.ranks] if c.op is Op.BACKWARD]
        for computation in backwards if stage.stream else ():
            for bucket in outline.gradients[computation.block]:
                time = times[stage.ranks][computation]
                yield _Moment(time, True, -places[bucket], bucket, True), stage, (computation,)
        for bucket in () if stage.stream else stage_buckets(outline, stage) - {*outline.frozen}:
            whole[bucket].append((stage, tuple(c for c in backwards if bucket in outline.gradients[c.block])))
    for bucket, uses in whole.items():
        last = max(times[stage.ranks][computation] for stage, served in uses for computation in served)
        for stage, served in uses:
            yield _Moment(last, True, -places[bucket], bucket, False), stage, served


def _times(placement: Placement, mode: Mode) -> Mapping[Ranks, Mapping[Computation, Fraction]]:
    by_ranks = {stage.ranks: stage for stage in placement.stages}
    left = {stage.ranks: deque(_tasks(placement, stage, mode)) for stage in placement.stages}
    times: dict[Ranks, dict[Computation, Fraction]] = {ranks: {} for ranks in left}
    free: dict[Ranks, Fraction] = dict.fromkeys(left, Fraction(0))
    ended: dict[tuple[int, int, Op, int], Fraction] = {}  # (pipeline, stage, operation, micro-batch) -> end
    ready = deque(left)
    while ready:
        ranks = ready.popleft()
        stage = by_ranks[ranks]
        while left[ranks]:
            task = left[ranks][0]
            role = stage.role_of(*task[1:])
            source = role.previous if task[0] is Op.FORWARD else role.following
            needed = (role.pipeline, role.stage + (-1 if task[0] is Op.FORWARD else 1), *task[:2])
            if source and needed not in ended:
                break
            left[ranks].popleft()
            begin = max(free[ranks], ended[needed]) if source else free[ranks]
            seconds = Fraction(1 if task[0] is Op.FORWARD else 2, 3 * len(stage.micro_batches) * len(stage.blocks))
            blocks = _blocks(placement.outline, stage, task)
            for i, block in enumerate(blocks):
                times[ranks][Computation(task[0], block, task[1])] = begin + i * seconds / len(blocks)
            free[ranks] = ended[role.pipeline, role.stage, *task[:2]] = begin + seconds
            target = role.following if task[0] is Op.FORWARD else role.previous
            ready.extend([target] if target else [])
    assert not any(left.values()), "all tasks of a schedule must run"
    return times


def _tasks(placement: Placement, stage: PlacedStage, mode: Mode) -> list[Task]:
    ops = {Work.FORWARD: Op.FORWARD, Work.BACKWARD: Op.BACKWARD}
    return [(ops[action.work], action.micro_batch, action.visit) for action in placement.actions(stage, mode)]


def _blocks(outline: Outline, stage: PlacedStage, task: Task) -> list[str]:
    first, last = stage.blocks[task[2]]
    order = range(first, last) if task[0] is Op.FORWARD else reversed(range(max(first, outline.lowest), last))
    return [outline.blocks[k] for k in order]

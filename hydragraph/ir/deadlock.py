"""Run the programs of all ranks without running anything, to see whether they come to their end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.queues import Transport, run_queues
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind


@dataclass(frozen=True)
class Deadlock:
    """Where programs stop that do not come to their end.

    Attributes:
        at: rank -> the index of the instruction it is stuck at, for every rank that is stuck.
        waits: rank -> the ranks it waits for, at least one.
    """

    at: Mapping[int, int]
    waits: Mapping[int, tuple[int, ...]]

    @property
    def chain(self) -> tuple[int, ...]:
        """Ranks of which each waits for the next: a cycle that repeats its first rank last, or up to an ended one."""
        path = [min(self.waits)]
        while path[-1] in self.waits and path[-1] not in path[:-1]:
            path.append(self.waits[path[-1]][0])
        return tuple(path if path[-1] not in self.waits else path[path.index(path[-1]) :])


def find_deadlock(programs: Sequence[RankProgram], transport: Transport = Transport.GLOO) -> Deadlock | None:
    """Run all programs together; return None when all of them end.

    Over gloo, sends are buffered, and everything else that could wait, waits: a receive for its message, the
    instruction that frees a message for its receiver to have it, a computation for its tensor-parallel peers to be at
    the same one and for every rank to have entered the pulls of its weights, a pull or push for every rank to have
    entered the earlier ones that must be over, the commit for all ranks. Programs that end here end whatever runs ahead
    in reality, since running ahead only takes waits away. So they end over `Transport.NCCL` as well, where the host
    runs ahead of everything; not always over the other two, where messages wait for more (`ir.queues`).

    Args:
        programs: one per rank, in the order of the ranks.
        transport: the way messages go.
    """
    thin = _thinned(programs)
    waits_of = _waits if transport is Transport.GLOO else partial(_waits_queued, transport=transport)
    if thin is not None and transport is not Transport.NCCL_LAZY and not waits_of(thin)[1]:
        return None
    at, waits = waits_of(programs)  # all of them, to say where they stop
    return Deadlock(at, waits) if waits else None


_Waits = tuple[dict[int, int], dict[int, tuple[int, ...]]]  # rank -> where it is stuck; rank -> whom it waits for


def _waits(programs: Sequence[RankProgram]) -> _Waits:
    run = _Run(programs).run()
    waits = run.waits()
    return {rank: run.at[rank] for rank in waits}, waits


def _waits_queued(programs: Sequence[RankProgram], transport: Transport) -> _Waits:
    stuck = run_queues(programs, transport)
    return {rank: each.at for rank, each in stuck.items()}, {rank: each.waits for rank, each in stuck.items()}


def _thinned(programs: Sequence[RankProgram]) -> list[RankProgram] | None:
    """Leave out what no rank can wait at for ever; None where that is not plain to see.

    - All ranks enter the pulls, and the pushes, in one order, and wait at the same places for earlier ones to be over.
    - Up to its last pull a rank receives nothing and waits for no receiver: it can wait for pulls alone, and for its
      tensor-parallel peers. The rank that has entered the fewest pulls waits for none, so all ranks get past the pulls.
    - From the first push on that waits for others, it sends and receives nothing: no message depends on pushes, and the
      rank that has entered the fewest waits for none.
    - The ranks of a stage run the same computations in the same order, and enter the same exchanges between them.
      Between two computations that no member has anything in between to wait at, they come together from the first to
      the second, so the first stands for both.
    - An update and a free of values wait for nobody.

        rank 0   receive h0.0   f1 f2 f3   send h3.0        rank 1   receive h0.0   f1 f2   receive h9.0   f3
        thinned  receive h0.0   f1    f3   send h3.0                 receive h0.0   f1      receive h9.0   f3
    """
    exchanges = [(i.op, i.target, _room(i)) for i in programs[0].instructions if i.op in _EXCHANGED]
    orders: dict[tuple[int, ...], list[Step]] = {}  # what each stage's ranks compute and enter
    entries: dict[tuple[int, ...], set[int]] = {}  # which computations some rank comes to after it may have waited
    for program in programs:
        if not _exchanges_apart(program):
            return None
        steps: list[Step] = []
        entered = entries.setdefault(program.tp, {0})
        count = 0
        for instruction in program.instructions:
            if instruction.op in _COMPUTED:
                count += 1
                steps.append((instruction.op, instruction.target, instruction.micro_batch))
            elif instruction.op in _EXCHANGED:
                steps.append((instruction.op, instruction.target, _room(instruction)))
            elif _can_wait(instruction):
                entered.add(count)
        if [step for step in steps if step[0] in _EXCHANGED] != exchanges:
            return None
        if orders.setdefault(program.tp, steps) != steps:
            return None
    if any(rank >= len(programs) or programs[rank].tp != tp for tp in orders for rank in tp):
        return None
    return [_kept(program, entries[program.tp]) for program in programs]


Step = tuple[Op, str, int | tuple[Value, ...] | None]
_COMPUTED = (Op.FORWARD, Op.BACKWARD)
_EXCHANGED = (Op.PULL, Op.PUSH)


def _kept(program: RankProgram, entered: Container[int]) -> RankProgram:
    """Return a program with its messages, the commit, and the computations that are entered after a wait."""
    kept = []
    count = 0
    for instruction in program.instructions:
        if instruction.op in _COMPUTED:
            if count in entered:
                kept.append(Instruction(instruction.op, instruction.target, instruction.micro_batch))
            count += 1
        elif instruction.op is Op.SEND or _can_wait(instruction):
            kept.append(instruction)
    return replace(program, instructions=tuple(kept))


def _can_wait(instruction: Instruction) -> bool:
    """Say whether a rank by itself may have to wait at an instruction; computations wait for others of the stage."""
    if instruction.op is Op.FREE:
        return any(value.kind is ValueKind.MESSAGE for value in instruction.reads)
    return instruction.op in (Op.RECEIVE, Op.COMMIT)


def _room(instruction: Instruction) -> tuple[Value, ...]:
    """Return the earlier exchanges that a pull or a push waits for."""
    return tuple(value for value in instruction.after if value not in instruction.reads)


def _exchanges_apart(program: RankProgram) -> bool:
    """Say whether a rank waits for others' exchanges before and behind its messages only, and for earlier ones only."""
    entered: set[tuple[Op, str]] = set()
    pulls = sum(i.op is Op.PULL for i in program.instructions)
    waited = False  # for a push
    for i in program.instructions:
        if i.op in _COMPUTED:
            read = (value.bucket for value in i.reads if value.kind is ValueKind.WEIGHTS)
            if any((Op.PULL, bucket) not in entered for bucket in read):
                return False
        elif i.op in _EXCHANGED:
            if any((i.op, value.bucket) not in entered for value in _room(i)):
                return False
            waited = waited or (i.op is Op.PUSH and bool(_room(i)))
            entered.add((i.op, i.target))
            pulls -= i.op is Op.PULL
        # Behind pushes messages may be waited for still, whose receivers have asked for them before their own.
        elif (pulls and _can_wait(i)) or (waited and i.op in (Op.SEND, Op.RECEIVE)):
            return False
    return True


def _peer(instruction: Instruction) -> int:
    assert instruction.peer is not None, "a send or receive has a peer"
    return instruction.peer


class _Run:
    """How far each rank has come, the messages under way, and how many ranks have entered each exchange."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.sent: Counter[tuple[int, int]] = Counter()  # (from, to) -> messages, which arrive in order
        self.received: Counter[tuple[int, int]] = Counter()
        self.turn: dict[tuple[int, Value], int] = {}  # (from, message) -> how many must have been received
        self.entered: Counter[tuple[Op, str]] = Counter()  # by exchange: how many ranks have
        self.committing: set[int] = set()  # who has come to the commit

    def run(self) -> _Run:
        """Run as far as the programs get; return itself."""
        waiting = deque(range(len(self.programs)))
        while waiting:
            # A rank runs until it must wait, and is tried again only when another does what it may wait for: going
            # round all ranks until nothing moves would try each of them once per instruction of the others.
            rank = waiting.popleft()
            while (instruction := self._current(rank)) is not None and not self._must_wait(rank, instruction):
                for peer in self._together(rank, instruction):
                    self._step(peer)
                    if peer != rank:
                        waiting.append(peer)
                waiting.extend(self._woken(instruction))
        return self

    def _must_wait(self, rank: int, instruction: Instruction) -> bool:
        if instruction.op is not Op.COMMIT:
            return bool(self._blockers(rank, instruction))
        # Who is at the commit stays there until all are, so they are counted: each would otherwise look at all others.
        self.committing.add(rank)
        if len(self.committing) < len(self.programs):
            return True
        self.committing.clear()
        return False

    def waits(self) -> dict[int, tuple[int, ...]]:
        """Return, for every rank that has not ended, the ranks it waits for."""
        current = {rank: self._current(rank) for rank in range(len(self.programs))}
        return {
            rank: self._blockers(rank, instruction) for rank, instruction in current.items() if instruction is not None
        }

    def _current(self, rank: int) -> Instruction | None:
        instructions = self.programs[rank].instructions
        return instructions[self.at[rank]] if self.at[rank] < len(instructions) else None

    def _together(self, rank: int, instruction: Instruction) -> Sequence[int]:
        """Return the ranks that must be at the same instruction."""
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            return self.programs[rank].tp
        return range(len(self.programs)) if instruction.op is Op.COMMIT else (rank,)

    def _blockers(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        """Return the ranks that an instruction waits for; none when it can run."""
        if instruction.op is Op.RECEIVE:
            pair = (_peer(instruction), rank)
            return () if self.received[pair] < self.sent[pair] else (_peer(instruction),)
        if instruction.op is Op.FREE:
            # A message is over once its receiver has it. Between two ranks they arrive in order, so the n-th one has
            # arrived when n have been received.
            messages = [value for value in instruction.reads if value.kind is ValueKind.MESSAGE]
            return tuple(m.peer for m in messages if self.received[rank, m.peer] < self.turn.get((rank, m), 0))
        if instruction.op in _EXCHANGED:
            return self._behind({(instruction.op, value.bucket) for value in _room(instruction)})
        if instruction.op not in (Op.FORWARD, Op.BACKWARD, Op.COMMIT):
            return ()
        late = tuple(
            r for r in self._together(rank, instruction) if r != rank and not self._same(instruction, self._current(r))
        )
        # A pull's weights are here once every rank has entered the pull: each of them may be an owner that sends.
        return (*late, *self._behind({(Op.PULL, v.bucket) for v in instruction.reads if v.kind is ValueKind.WEIGHTS}))

    def _behind(self, exchanges: set[tuple[Op, str]]) -> tuple[int, ...]:
        """Return the ranks that have yet to enter some of these exchanges."""
        missing = {each for each in exchanges if self.entered[each] < len(self.programs)}
        if not missing:
            return ()
        ahead = (self.programs[rank].instructions[self.at[rank] :] for rank in range(len(self.programs)))
        return tuple(rank for rank, left in enumerate(ahead) if any((i.op, i.target) in missing for i in left))

    @staticmethod
    def _same(one: Instruction, other: Instruction | None) -> bool:
        key = (one.op, one.target, one.micro_batch)
        return other is not None and key == (other.op, other.target, other.micro_batch)

    def _step(self, rank: int) -> None:
        instruction = self.programs[rank].instructions[self.at[rank]]
        self.at[rank] += 1
        if instruction.op is Op.SEND:
            self.sent[rank, _peer(instruction)] += 1
            for message in instruction.writes:
                self.turn[rank, message] = self.sent[rank, _peer(instruction)]
        elif instruction.op is Op.RECEIVE:
            self.received[_peer(instruction), rank] += 1
        elif instruction.op in _EXCHANGED:
            self.entered[instruction.op, instruction.target] += 1

    def _woken(self, instruction: Instruction) -> Sequence[int]:
        """Return the ranks that may have waited for what has just run."""
        if instruction.op in (Op.SEND, Op.RECEIVE):
            return (_peer(instruction),)
        # Only the last rank to enter an exchange lets others go on. Peers of a computation, or of the commit, need no
        # waking: the last one to get there steps all of them (`_together`).
        complete = self.entered[instruction.op, instruction.target] == len(self.programs)
        return range(len(self.programs)) if complete else ()

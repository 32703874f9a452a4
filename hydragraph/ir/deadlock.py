"""Simulation of all ranks' programs together, to detect deadlocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.queues import Transport, run_queues
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind


@dataclass(frozen=True)
class Deadlock:
    """State in which programs are stuck.

    Attributes:
        at: stuck rank -> index of its instruction.
        waits: stuck rank -> the ranks it waits for.
    """

    at: Mapping[int, int]
    waits: Mapping[int, tuple[int, ...]]

    @property
    def chain(self) -> tuple[int, ...]:
        """Ranks that each wait for the next: a cycle with its first rank repeated, or a path to an ended rank."""
        path = [min(self.waits)]
        while path[-1] in self.waits and path[-1] not in path[:-1]:
            path.append(self.waits[path[-1]][0])
        return tuple(path if path[-1] not in self.waits else path[path.index(path[-1]) :])


def find_deadlock(programs: Sequence[RankProgram], transport: Transport = Transport.GLOO) -> Deadlock | None:
    """Simulate the programs of all ranks, in rank order; return None if all end.

    Over gloo, sends are buffered, and everything else waits as long as it could: a receive for its message; a free of a
    message for its receiver; a computation for its tensor-parallel peers and for every rank to enter the pulls of its
    weights; a pull or push for every rank to enter the earlier ones in its `after`; and the commit for all ranks.
    Programs that end here also end over `Transport.NCCL`, but not always over the other two (`ir.queues`).
    """
    if transport is not Transport.GLOO:
        queued = run_queues(programs, transport)
        stuck_at = {rank: stuck.at for rank, stuck in queued.items()}
        return Deadlock(stuck_at, {rank: stuck.waits for rank, stuck in queued.items()}) if queued else None
    thin = _thinned(programs)
    if thin is not None and not _Simulation(thin).run().waits():
        return None
    simulation = _Simulation(programs).run()  # to report where they are stuck
    waits = simulation.waits()
    return Deadlock({rank: simulation.at[rank] for rank in waits}, waits) if waits else None


def _thinned(programs: Sequence[RankProgram]) -> list[RankProgram] | None:
    """Remove instructions where no rank can wait forever; return None unless all of this holds.

    - All ranks enter pulls and pushes in one order, and wait at the same places for earlier ones.
    - Up to its last pull a rank waits only for pulls and for its tensor-parallel peers. The rank that has entered the
      fewest pulls does not wait for any, so all ranks get past the pulls.
    - From the first push that waits for others, a rank neither sends nor receives.
    - The ranks of a stage run the same computations in the same order. If no member can wait between two of them, the
      first represents both.
    - An update and a free of values never wait.

        rank 0   receive h0.0   f1 f2 f3   send h3.0        rank 1   receive h0.0   f1 f2   receive h9.0   f3
        thinned  receive h0.0   f1    f3   send h3.0                 receive h0.0   f1      receive h9.0   f3
    """
    exchanges = [(i.op, i.target, _room(i)) for i in programs[0].instructions if i.op in _EXCHANGED]
    orders: dict[tuple[int, ...], list[Step]] = {}
    entries: dict[tuple[int, ...], set[int]] = {}  # computations that follow a possible wait on some rank
    for program in programs:
        if not _exchanges_apart(program):
            return None
        steps: list[Step] = []
        entered = entries.setdefault(program.tp, {0})
        count = 0
        for instruction in program.instructions:
            if instruction.op in _COMPUTED:
                count += 1
                steps.append(instruction.step)
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
    kept: list[Instruction] = []
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
    if instruction.op is Op.FREE:
        return any(value.kind is ValueKind.MESSAGE for value in instruction.reads)
    return instruction.op in (Op.RECEIVE, Op.COMMIT)


def _room(instruction: Instruction) -> tuple[Value, ...]:
    return tuple(value for value in instruction.after if value not in instruction.reads)


def _exchanges_apart(program: RankProgram) -> bool:
    """Return whether a rank waits only for earlier exchanges, and not between messages."""
    entered: set[tuple[Op, str]] = set()
    pulls = sum(i.op is Op.PULL for i in program.instructions)
    waited = False
    for i in program.instructions:
        if i.op in _COMPUTED:
            read = (value.exchange for value in i.reads if value.kind is ValueKind.WEIGHTS)
            if any((Op.PULL, bucket) not in entered for bucket in read):
                return False
        elif i.op in _EXCHANGED:
            if any((i.op, value.exchange) not in entered for value in _room(i)):
                return False
            waited = waited or (i.op is Op.PUSH and bool(_room(i)))
            entered.add((i.op, i.target))
            pulls -= i.op is Op.PULL
        # After pushes, a rank may still wait for its messages to leave; their receivers request them before they push.
        elif (pulls and _can_wait(i)) or (waited and i.op in (Op.SEND, Op.RECEIVE)):
            return False
    return True


class _Simulation:
    """Each rank's position, the messages in flight, and the number of ranks in each exchange."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.sent: Counter[tuple[int, int]] = Counter()  # (from, to) -> number of messages
        self.received: Counter[tuple[int, int]] = Counter()
        self.turn: dict[tuple[int, Value], int] = {}  # (from, message) -> number of receives that complete it
        self.entered: Counter[tuple[Op, str]] = Counter()  # exchange -> number of ranks that have entered it
        self.committing: set[int] = set()  # ranks that have reached the commit

    def run(self) -> _Simulation:
        waiting = deque(range(len(self.programs)))
        while waiting:
            # A rank that waits is retried only when another does something it may wait for.
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
        self.committing.add(rank)
        if len(self.committing) < len(self.programs):
            return True
        self.committing.clear()
        return False

    def waits(self) -> dict[int, tuple[int, ...]]:
        current = {rank: self._current(rank) for rank in range(len(self.programs))}
        return {
            rank: self._blockers(rank, instruction) for rank, instruction in current.items() if instruction is not None
        }

    def _current(self, rank: int) -> Instruction | None:
        instructions = self.programs[rank].instructions
        return instructions[self.at[rank]] if self.at[rank] < len(instructions) else None

    def _together(self, rank: int, instruction: Instruction) -> Sequence[int]:
        if instruction.op in _COMPUTED:
            return self.programs[rank].tp
        return range(len(self.programs)) if instruction.op is Op.COMMIT else (rank,)

    def _blockers(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        if instruction.op is Op.RECEIVE:
            source = instruction.partner
            return () if self.received[source, rank] < self.sent[source, rank] else (source,)
        if instruction.op is Op.FREE:
            # Messages between two ranks arrive in order, so the n-th one has arrived when n have been received.
            messages = [value for value in instruction.reads if value.kind is ValueKind.MESSAGE]
            return tuple(m.peer for m in messages if self.received[rank, m.peer] < self.turn.get((rank, m), 0))
        if instruction.op in _EXCHANGED:
            return self._behind({(instruction.op, value.exchange) for value in _room(instruction)})
        if instruction.op not in (*_COMPUTED, Op.COMMIT):
            return ()
        current = {r: self._current(r) for r in self._together(rank, instruction) if r != rank}
        late = tuple(r for r, its in current.items() if its is None or its.step != instruction.step)
        # A pull's weights have arrived once every rank has entered the pull.
        return (*late, *self._behind({(Op.PULL, v.exchange) for v in instruction.reads if v.kind is ValueKind.WEIGHTS}))

    def _behind(self, exchanges: set[tuple[Op, str]]) -> tuple[int, ...]:
        missing = {exchange for exchange in exchanges if self.entered[exchange] < len(self.programs)}
        if not missing:
            return ()
        ahead = (self.programs[rank].instructions[self.at[rank] :] for rank in range(len(self.programs)))
        return tuple(rank for rank, left in enumerate(ahead) if any((i.op, i.target) in missing for i in left))

    def _step(self, rank: int) -> None:
        instruction = self.programs[rank].instructions[self.at[rank]]
        self.at[rank] += 1
        if instruction.op is Op.SEND:
            self.sent[rank, instruction.partner] += 1
            for message in instruction.writes:
                self.turn[rank, message] = self.sent[rank, instruction.partner]
        elif instruction.op is Op.RECEIVE:
            self.received[instruction.partner, rank] += 1
        elif instruction.op in _EXCHANGED:
            self.entered[instruction.op, instruction.target] += 1

    def _woken(self, instruction: Instruction) -> Sequence[int]:
        if instruction.op in (Op.SEND, Op.RECEIVE):
            return (instruction.partner,)
        # Only the last rank that enters an exchange releases the others.
        complete = self.entered[instruction.op, instruction.target] == len(self.programs)
        return range(len(self.programs)) if complete else ()

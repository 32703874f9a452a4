"""Simulation of all ranks' programs together, without executing them, to detect deadlocks."""

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
    """State in which programs are stuck.

    Attributes:
        at: rank -> index of the instruction it is stuck at, for every stuck rank.
        waits: rank -> the ranks it waits for, at least one.
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
    """Simulate all programs together; return None if all of them end.

    Over gloo, sends are buffered, and everything else that could wait does: a receive waits for its message; the
    instruction that frees a message waits for its receiver to have it; a computation waits for its tensor-parallel
    peers to reach the same one and for every rank to have entered the pulls of its weights; a pull or push waits for
    every rank to have entered the earlier ones that must be complete; and the commit waits for all ranks. Programs that
    end here end however far ranks run ahead in reality, since running ahead only removes waits. So they also end over
    `Transport.NCCL`, where the host runs ahead of everything, but not always over the other two, where messages wait
    for more (`ir.queues`).

    Args:
        programs: one per rank, in rank order.
        transport: transport of the messages.
    """
    thin = _thinned(programs)
    waits_of = _waits if transport is Transport.GLOO else partial(_waits_queued, transport=transport)
    if thin is not None and transport is not Transport.NCCL_LAZY and not waits_of(thin)[1]:
        return None
    at, waits = waits_of(programs)  # the full programs, to report where they are stuck
    return Deadlock(at, waits) if waits else None


_Waits = tuple[dict[int, int], dict[int, tuple[int, ...]]]  # rank -> where it is stuck; rank -> the ranks it waits for


def _waits(programs: Sequence[RankProgram]) -> _Waits:
    run = _Run(programs).run()
    waits = run.waits()
    return {rank: run.at[rank] for rank in waits}, waits


def _waits_queued(programs: Sequence[RankProgram], transport: Transport) -> _Waits:
    stuck = run_queues(programs, transport)
    return {rank: each.at for rank, each in stuck.items()}, {rank: each.waits for rank, each in stuck.items()}


def _thinned(programs: Sequence[RankProgram]) -> list[RankProgram] | None:
    """Remove instructions where no rank can wait forever; return None if that is not obvious.

    - All ranks enter the pulls, and the pushes, in one order, and wait at the same places for earlier ones to complete.
    - Up to its last pull a rank neither receives nor waits for a receiver: it can only wait for pulls and for its
      tensor-parallel peers. The rank that has entered the fewest pulls does not wait for any, so all ranks get past the
      pulls.
    - From the first push that waits for others, a rank neither sends nor receives: no message depends on pushes, and
      the rank that has entered the fewest does not wait.
    - The ranks of a stage run the same computations in the same order, and enter the same exchanges between them. If no
      member has anything to wait at between two computations, they proceed together from the first to the second, so
      the first represents both.
    - An update and a free of values never wait.

        rank 0   receive h0.0   f1 f2 f3   send h3.0        rank 1   receive h0.0   f1 f2   receive h9.0   f3
        thinned  receive h0.0   f1    f3   send h3.0                 receive h0.0   f1      receive h9.0   f3
    """
    exchanges = [(i.op, i.target, _room(i)) for i in programs[0].instructions if i.op in _EXCHANGED]
    orders: dict[tuple[int, ...], list[Step]] = {}  # computations and exchanges of each stage's ranks
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
    """Return a program with only its messages, the commit, and the computations that follow a wait.

    A computation that is kept reads the received values of those that it represents: over NCCL it waits for them.
    """
    kept: list[Instruction] = []
    received: set[Value] = set()
    first = count = 0  # the latest computation that is kept, which follows the messages received so far
    for instruction in program.instructions:
        if instruction.op in _COMPUTED:
            reads = tuple(v for v in dict.fromkeys((*instruction.after, *instruction.reads)) if v in received)
            if count in entered:
                first = len(kept)
                kept.append(Instruction(instruction.op, instruction.target, instruction.micro_batch, reads=reads))
            elif reads:
                kept[first] = replace(kept[first], reads=(*kept[first].reads, *reads))
            count += 1
        elif instruction.op is Op.SEND or _can_wait(instruction):
            kept.append(instruction)
            received.update(instruction.writes if instruction.op is Op.RECEIVE else ())
    return replace(program, instructions=tuple(kept))


def _can_wait(instruction: Instruction) -> bool:
    """Return whether a rank may have to wait at an instruction alone; computations wait for the stage's ranks."""
    if instruction.op is Op.FREE:
        return any(value.kind is ValueKind.MESSAGE for value in instruction.reads)
    return instruction.op in (Op.RECEIVE, Op.COMMIT)


def _room(instruction: Instruction) -> tuple[Value, ...]:
    """Return the earlier exchanges that a pull or a push waits for."""
    return tuple(value for value in instruction.after if value not in instruction.reads)


def _exchanges_apart(program: RankProgram) -> bool:
    """Return whether a rank waits for exchanges only before and after its messages, and only for earlier exchanges."""
    entered: set[tuple[Op, str]] = set()
    pulls = sum(i.op is Op.PULL for i in program.instructions)
    waited = False  # for a push
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
        # After pushes a rank may still wait for messages, whose receivers have requested them before their own pushes.
        elif (pulls and _can_wait(i)) or (waited and i.op in (Op.SEND, Op.RECEIVE)):
            return False
    return True


def _peer(instruction: Instruction) -> int:
    assert instruction.peer is not None, "a send or receive has a peer"
    return instruction.peer


class _Run:
    """State of a simulation: each rank's position, the messages in flight, and the number of ranks in each exchange."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.sent: Counter[tuple[int, int]] = Counter()  # (from, to) -> number of messages, which arrive in order
        self.received: Counter[tuple[int, int]] = Counter()
        self.turn: dict[tuple[int, Value], int] = {}  # (from, message) -> number of receives that complete it
        self.entered: Counter[tuple[Op, str]] = Counter()  # exchange -> number of ranks that have entered it
        self.committing: set[int] = set()  # ranks that have reached the commit

    def run(self) -> _Run:
        """Run the programs as far as possible; return self."""
        waiting = deque(range(len(self.programs)))
        while waiting:
            # A rank runs until it must wait, and is retried only when another rank does something it may wait for:
            # polling all ranks until none advances would try each of them once per instruction of the others.
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
        # A rank at the commit stays there until all are, so they are counted instead of each checking all others.
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
        """Return the ranks that an instruction waits for; empty if it can run."""
        if instruction.op is Op.RECEIVE:
            pair = (_peer(instruction), rank)
            return () if self.received[pair] < self.sent[pair] else (_peer(instruction),)
        if instruction.op is Op.FREE:
            # A message is complete once its receiver has it. Messages between two ranks arrive in order, so the n-th
            # one has arrived when n have been received.
            messages = [value for value in instruction.reads if value.kind is ValueKind.MESSAGE]
            return tuple(m.peer for m in messages if self.received[rank, m.peer] < self.turn.get((rank, m), 0))
        if instruction.op in _EXCHANGED:
            return self._behind({(instruction.op, value.exchange) for value in _room(instruction)})
        if instruction.op not in (Op.FORWARD, Op.BACKWARD, Op.COMMIT):
            return ()
        late = tuple(
            r for r in self._together(rank, instruction) if r != rank and not self._same(instruction, self._current(r))
        )
        # A pull's weights have arrived once every rank has entered the pull: each of them may be an owner that sends.
        return (*late, *self._behind({(Op.PULL, v.exchange) for v in instruction.reads if v.kind is ValueKind.WEIGHTS}))

    def _behind(self, exchanges: set[tuple[Op, str]]) -> tuple[int, ...]:
        """Return the ranks that have not yet entered some of these exchanges."""
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
        """Return the ranks that may have waited for the instruction that has just run."""
        if instruction.op in (Op.SEND, Op.RECEIVE):
            return (_peer(instruction),)
        # Only the last rank to enter an exchange releases others. Peers of a computation or of the commit need no
        # waking: the last one to arrive advances all of them (`_together`).
        complete = self.entered[instruction.op, instruction.target] == len(self.programs)
        return range(len(self.programs)) if complete else ()

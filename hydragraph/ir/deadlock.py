"""Detection of deadlocks by simulating all ranks' programs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydragraph.ir.instruction import EXCHANGED, Instruction, Op
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind


@dataclass(frozen=True)
class Deadlock:
    """State in which programs are stuck.

    Attributes:
        at: for each stuck rank, the index of the instruction that waits.
    """

    at: Mapping[int, int]
    waits: Mapping[int, tuple[int, ...]]

    @property
    def chain(self) -> tuple[int, ...]:
        """Ranks, each waiting for the next: a cycle (first rank repeated), or a path to an ended rank."""
        path = [min(self.waits)]
        while path[-1] in self.waits and path[-1] not in path[:-1]:
            path.append(self.waits[path[-1]][0])
        return tuple(path if path[-1] not in self.waits else path[path.index(path[-1]) :])


def find_deadlock(programs: Sequence[RankProgram]) -> Deadlock | None:
    """Simulate all ranks' programs (in rank order) over gloo, and return None if all end.

    Sends never wait. Other instructions wait whenever gloo could: for messages, for tensor-parallel peers, or for ranks
    that have not entered a pull or push. Programs that end over gloo also end over NCCL if each ordered pair of ranks
    has its own communicator (`tests.ir.queues`).
    """
    simulation = _Simulation(programs).run()
    waits = simulation.waits()
    return Deadlock({rank: simulation.at[rank] for rank in waits}, waits) if waits else None


_COMPUTED = (Op.FORWARD, Op.BACKWARD)


class _Simulation:
    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        # (sender, message) -> number of receives that complete the message.
        self.turn: dict[tuple[int, Value], int] = {}
        self.entered: Counter[tuple[Op, str]] = Counter()
        self.committing: set[int] = set()

    def run(self) -> _Simulation:
        # waiting: ranks to try (again), in any order: an instruction that can run can also run
        # later.
        waiting = deque(range(len(self.programs)))
        while waiting:
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
            return bool(self._blockers(rank, instruction) or self._incomplete(instruction))
        # The last arrival lets all ranks pass.
        self.committing.add(rank)
        if len(self.committing) < len(self.programs):
            return True
        self.committing.clear()
        return False

    def waits(self) -> dict[int, tuple[int, ...]]:
        current = {rank: self._current(rank) for rank in range(len(self.programs))}
        return {
            rank: (*self._blockers(rank, instruction), *self._behind(self._incomplete(instruction)))
            for rank, instruction in current.items()
            if instruction is not None
        }

    def _current(self, rank: int) -> Instruction | None:
        instructions = self.programs[rank].instructions
        return instructions[self.at[rank]] if self.at[rank] < len(instructions) else None

    def _together(self, rank: int, instruction: Instruction) -> Sequence[int]:
        # Computations may contain collectives, so a stage's ranks run together.
        if instruction.op in _COMPUTED:
            return self.programs[rank].tp
        return range(len(self.programs)) if instruction.op is Op.COMMIT else (rank,)

    def _blockers(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        if instruction.op is Op.RECEIVE:
            source = instruction.partner
            return () if self.received[source, rank] < self.sent[source, rank] else (source,)
        if instruction.op is Op.FREE:
            # A pair's messages arrive in order.
            messages = [value for value in instruction.reads if value.kind is ValueKind.MESSAGE]
            return tuple(m.peer for m in messages if self.received[rank, m.peer] < self.turn.get((rank, m), 0))
        if instruction.op not in (*_COMPUTED, Op.COMMIT):
            return ()
        current = {r: self._current(r) for r in self._together(rank, instruction) if r != rank}
        return tuple(r for r, its in current.items() if its is None or its.step != instruction.step)

    def _incomplete(self, instruction: Instruction) -> set[tuple[Op, str]]:
        needed = set()
        if instruction.op in _COMPUTED:
            needed = {(Op.PULL, value.exchange) for value in instruction.reads if value.kind is ValueKind.WEIGHTS}
        elif instruction.op in EXCHANGED:
            # `after` also names earlier exchanges to await, which limits the bytes in flight.
            room = (value for value in instruction.after if value not in instruction.reads)
            needed = {(instruction.op, value.exchange) for value in room}
        return {exchange for exchange in needed if self.entered[exchange] < len(self.programs)}

    def _behind(self, exchanges: set[tuple[Op, str]]) -> tuple[int, ...]:
        if not exchanges:
            return ()
        ahead = (self.programs[rank].instructions[self.at[rank] :] for rank in range(len(self.programs)))
        return tuple(rank for rank, left in enumerate(ahead) if any((i.op, i.target) in exchanges for i in left))

    def _step(self, rank: int) -> None:
        instruction = self.programs[rank].instructions[self.at[rank]]
        self.at[rank] += 1
        if instruction.op is Op.SEND:
            self.sent[rank, instruction.partner] += 1
            for message in instruction.writes:
                self.turn[rank, message] = self.sent[rank, instruction.partner]
        elif instruction.op is Op.RECEIVE:
            self.received[instruction.partner, rank] += 1
        elif instruction.op in EXCHANGED:
            self.entered[instruction.op, instruction.target] += 1

    def _woken(self, instruction: Instruction) -> Sequence[int]:
        if instruction.op in (Op.SEND, Op.RECEIVE):
            return (instruction.partner,)
        complete = self.entered[instruction.op, instruction.target] == len(self.programs)
        return range(len(self.programs)) if complete else ()

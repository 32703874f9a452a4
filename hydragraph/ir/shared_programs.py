"""Programs of many ranks. Ranks of a *kind* share one body of instructions, and differ only in their peers.

Rank numbers in a body index the peers of the rank that runs it. Example with two stages of two ranks:

    body     send h1.0 -> rank 0
    peers    (2) for rank 0, which therefore sends to rank 2; (3) for rank 1

A rank's peers are distinct, so a proof about one rank's values holds for all ranks of its kind (`ir.verify`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hydragraph.ir.instruction import Instruction
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind, readdressed

Body = tuple[Instruction, ...]
Peers = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SharedPrograms(Sequence[RankProgram]):
    """Programs of all ranks, built on demand.

    Attributes:
        bodies: instructions of each kind; ranks of a kind have equal stages, layers, tp and micro-batches.
        peers: for each rank, the ranks that its body numbers 0, 1, ...
    """

    headers: tuple[RankProgram, ...]
    bodies: tuple[Body, ...]
    kinds: tuple[int, ...]
    peers: tuple[Peers, ...]

    @cached_property
    def _places(self) -> list[list[int]]:
        return [_naming(body) for body in self.bodies]

    def __len__(self) -> int:
        return len(self.headers)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[index] for index in range(*rank.indices(len(self))))
        kind = self.kinds[rank]
        body = _with_peers(self.bodies[kind], self._places[kind], self.peers[rank])
        return replace(self.headers[rank], instructions=body)

    def of_kind(self, kind: int) -> tuple[int, ...]:
        return tuple(rank for rank, other in enumerate(self.kinds) if other == kind)

    @property
    def instructions(self) -> int:
        return sum(len(self.bodies[kind]) for kind in self.kinds)

    @staticmethod
    def of(programs: Iterable[RankProgram]) -> SharedPrograms:
        """Group programs into kinds, ordered by first rank."""
        if isinstance(programs, SharedPrograms):
            return programs
        return SharedPrograms.gather((replace(p, instructions=()), *numbered(p.instructions)) for p in programs)

    @staticmethod
    def gather(found: Iterable[tuple[RankProgram, Body, Peers]]) -> SharedPrograms:
        """Combine headers, bodies and peers, and merge equal bodies of a kind."""
        # number: (place, body) -> kind, for equal bodies.
        number: dict[Hashable, int] = {}
        # The key is a body's identity, so that bodies are compared once.
        kind_of: dict[tuple[Hashable, int], int] = {}
        bodies: list[Body] = []
        headers: list[RankProgram] = []
        kinds: list[int] = []
        peers: list[Peers] = []
        for header, body, named in found:
            place = _place(header)
            kind = kind_of.get((place, id(body)))
            if kind is None:
                kind = number.setdefault((place, body), len(bodies))
                if kind == len(bodies):
                    bodies.append(body)
                # Ids of discarded bodies may be reused.
                if bodies[kind] is body:
                    kind_of[place, id(body)] = kind
            headers.append(header)
            kinds.append(kind)
            peers.append(named)
        return SharedPrograms(tuple(headers), tuple(bodies), tuple(kinds), tuple(peers))


def numbered(instructions: Sequence[Instruction]) -> tuple[Body, Peers]:
    """Return instructions with peers numbered by first occurrence, and the peers in this order."""
    at = _naming(instructions)
    number: dict[int, int] = {}
    for i in at:
        for peer in _peers(instructions[i]):
            number.setdefault(peer, len(number))
    return _with_peers(instructions, at, number), tuple(number)


def _place(header: RankProgram) -> Hashable:
    roles = tuple((role.stage, role.micro_batches) for role in header.roles)
    return header.strategy, header.ranks, roles, len(header.tp), header.layers


def _naming(instructions: Sequence[Instruction]) -> list[int]:
    return [i for i, instruction in enumerate(instructions) if any(True for _ in _peers(instruction))]


def _peers(instruction: Instruction) -> Iterator[int]:
    if instruction.peer is not None:
        yield instruction.peer
    for values in (instruction.reads, instruction.writes, instruction.after):
        yield from (value.peer for value in values if value.kind is ValueKind.MESSAGE)


def _with_peers(instructions: Sequence[Instruction], at: Sequence[int], name: Any) -> Body:

    def renamed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(
            readdressed(value, name[value.peer]) if value.kind is ValueKind.MESSAGE else value for value in values
        )

    body = list(instructions)
    for i in at:
        old = body[i]
        peer = None if old.peer is None else name[old.peer]
        body[i] = Instruction(
            old.op, old.target, old.micro_batch, peer, renamed(old.reads), renamed(old.writes), renamed(old.after)
        )
    return tuple(body)

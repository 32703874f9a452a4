"""Actors of a simulation: an actor represents all ranks of a stage.

Programs of a stage's ranks, and of equal pipelines, differ only in the ranks to which they send, so a thousand ranks
run only a few dozen different programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import Span
from hydragraph.ir.value import Value, ValueKind
from hydragraph.passes.pipeline import placed_program
from hydragraph.passes.place import PlacedRole, PlacedStage, Placement, place
from hydragraph.spec.strategy import Strategy

Pair = tuple[int, int]


class StageMessage(NamedTuple):
    """Hidden state (`ahead`), or its gradient, of the block at `position`."""

    ahead: bool
    micro_batch: int
    position: int


def message_of(instruction: Instruction) -> StageMessage:
    (value,) = instruction.reads or instruction.writes
    return StageMessage(value.kind is ValueKind.ACTIVATION, value.micro_batch, value.position)


@dataclass(frozen=True, eq=False)
class ActorProgram:
    """Program of one rank of an actor; FREE is in no queue.

    Attributes:
        needs: for each instruction, indices of the instructions that must end before it begins.
        compute, pulls, pushes, sends, receives, copies: indices of each queue's instructions.
        messages: by the index of a send, the message and the number of earlier sends of the same message.
    """

    instructions: tuple[Instruction, ...]
    needs: tuple[tuple[int, ...], ...]
    compute: tuple[int, ...]
    pulls: tuple[int, ...]
    pushes: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    copies: tuple[int, ...]
    messages: dict[int, tuple[StageMessage, int]]

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> ActorProgram:
        """Sort instructions into queues; an instruction whose input is never written waits forever."""
        queues: dict[str, list[int]] = {name: [] for name in ("compute", *dict.fromkeys(_QUEUES.values()))}
        needs: list[tuple[int, ...]] = []
        maker: dict[Value, int] = {}
        sent: dict[StageMessage, int] = {}
        messages = {}
        latest = -1
        # Copies to the host that the next computation awaits
        copied: list[int] = []
        for i, instruction in enumerate(instructions):
            if instruction.op is Op.FREE:
                copied += [maker[value] for value in instruction.after if value.kind is ValueKind.COPYING]
                needs.append(())
                continue
            windowed = instruction.op in (Op.PULL, Op.PUSH)
            after = [value for value in instruction.after if not windowed or value in instruction.reads]
            waited = {maker.get(value, i) for value in after}
            # A fetch may use memory freed by earlier computations
            if instruction.op is Op.FETCH:
                waited.update([latest] if latest >= 0 else [])
            if instruction.stream is Stream.COMPUTE:
                waited.update(copied)
                copied = []
            needs.append(tuple(sorted(waited)) if waited else ())
            queues[_QUEUES.get(instruction.op, "compute")].append(i)
            if instruction.op is Op.SEND:
                what = message_of(instruction)
                messages[i] = what, sent.get(what, 0)
                sent[what] = messages[i][1] + 1
            if instruction.stream is Stream.COMPUTE:
                latest = i
            for value in instruction.writes:
                maker[value] = i
        queued = {name: tuple(indices) for name, indices in queues.items()}
        return cls(tuple(instructions), tuple(needs), **queued, messages=messages)


_QUEUES = {
    Op.PULL: "pulls",
    Op.PUSH: "pushes",
    Op.SEND: "sends",
    Op.RECEIVE: "receives",
    Op.OFFLOAD: "copies",
    Op.FETCH: "copies",
}


@dataclass(frozen=True, eq=False)
class Actor:
    """Ranks simulated together.

    Attributes:
        ranks: the stage's ranks in tensor-parallel order, or one idle rank.
        roles: the stage's role in each pipeline, or of each interleaved stage.
        layers: half-open range of each stage's layers.
    """

    ranks: tuple[int, ...]
    roles: tuple[PlacedRole, ...]
    layers: tuple[Span, ...]
    program: ActorProgram
    of: Callable[[int], Sequence[Instruction]] = field(repr=False)

    @property
    def name(self) -> str:
        ranks = self.ranks
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            return f"ranks {ranks[0]}-{ranks[-1]}"
        return f"ranks {', '.join(map(str, ranks))}"

    @cached_property
    def role_of(self) -> Mapping[int, PlacedRole]:
        return {m: role for role in self.roles for m in role.micro_batches}

    @cached_property
    def receivers(self) -> Mapping[StageMessage, tuple[int, ...]]:
        receivers = {}
        for role in self.roles:
            first, end = self.layers[role.visit]
            for m in role.micro_batches:
                receivers[StageMessage(True, m, end)] = role.following
                receivers[StageMessage(False, m, first)] = role.previous
        return receivers

    def pairs(self, index: int) -> tuple[Pair, ...]:
        message, turn = self.program.messages[index]
        receivers = self.receivers[message][turn * len(self.ranks) :]
        return tuple(zip(self.ranks, receivers, strict=False))


def stage_actors(
    outline: Outline, strategy: Strategy, micro_batches: Sequence[int], ranks: int, mode: Mode = "train"
) -> tuple[Actor, ...]:
    """Lower a strategy to one actor per stage with work, and one per idle rank."""
    strategy.check(outline.layers, ranks)
    placement = place(outline, strategy, micro_batches)
    compiled: dict[object, ActorProgram] = {}

    def of(rank: int) -> tuple[Instruction, ...]:
        return placed_program(placement, "", mode, rank, ranks).instructions

    def program(rank: int, key: object) -> ActorProgram:
        if key not in compiled:
            compiled[key] = ActorProgram.of(of(rank))
        return compiled[key]

    stages = placement.stages
    working = [Actor(s.ranks, s.roles, s.layers, program(s.ranks[0], _key(placement, s)), of) for s in stages]
    idle = sorted(set(range(ranks)) - set(placement.stage_of))
    return (*working, *(Actor((rank,), (), (), program(rank, None), of) for rank in idle))


def _key(placement: Placement, stage: PlacedStage) -> object:
    """Return a key that is equal for stages whose instructions differ only in peers."""
    # Instructions' order depends on the schedule (`beats`) and on interleaved stages' neighbors.
    peers = {ranks: i for i, ranks in enumerate(dict.fromkeys(n for r in stage.roles for n in _neighbours(r)))}
    roles = [(r.micro_batches, *((len(n), peers[n]) for n in _neighbours(r))) for r in stage.roles]
    return (stage.blocks, stage.offload, len(stage.ranks), *roles, *placement.beats(stage).values())


def _neighbours(role: PlacedRole) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return role.previous, role.following

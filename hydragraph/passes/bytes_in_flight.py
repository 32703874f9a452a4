"""Limit on the bytes of pulls and pushes in flight (`hg.compile(window=)`)."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.ir.instruction import EXCHANGED, Instruction, Op, Stream
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.value import Value, ValueKind


def windowed(exchanges: Sequence[Instruction], outline: Outline) -> list[Instruction]:
    awaited = outline.awaited([exchange.target for exchange in exchanges])
    return [
        exchange.waiting_for(tuple(map(EXCHANGED[exchange.op], names)))
        for exchange, names in zip(exchanges, awaited, strict=True)
    ]


def interleaved(pulls: Sequence[Instruction], work: Sequence[Instruction]) -> list[Instruction]:
    """Put a rank's pulls before its work, but run the first micro-batch's forwards as soon as their weights arrive.

    Only first stages do so, because later stages would wait for hidden states.
    """
    first = _first_forwards(work)
    arrived: set[Value] = set()
    placed: list[Instruction] = []
    at = 0
    for pull in pulls:
        placed.append(pull)
        # The rank waits for `pull.after` anyway, so forwards that need no more can run here.
        arrived.update(pull.after)
        while arrived and at < first and _pulled(work[at]) <= arrived:
            placed.append(work[at])
            at += 1
    return [*placed, *work[at:]]


def _first_forwards(work: Sequence[Instruction]) -> int:
    for i, instruction in enumerate(work):
        # On later stages, work[0] is a receive, so this returns 0.
        forward = instruction.op is Op.FORWARD and instruction.micro_batch == work[0].micro_batch
        if instruction.op is not Op.SEND and not forward:
            return i
    return len(work)


def _pulled(instruction: Instruction) -> set[Value]:
    return {value for value in instruction.reads if value.kind is ValueKind.WEIGHTS}


def free_to_wait(work: Sequence[Instruction], first_stage: bool) -> int:
    """Return the first index in a rank's work where a wait for pushes delays no other rank."""
    # All ranks of a stage need the same index, although only some send.
    if not first_stage:
        return len(work)
    return max((i + 1 for i, instruction in enumerate(work) if instruction.stream is Stream.P2P), default=0)

"""Limit on the bytes in flight (`hg.compile(window=)`): a pull or push waits until enough earlier ones have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.value import Value, ValueKind, bucket_of, gradients, weights

NAMED: Mapping[Op, Callable[[str], Value]] = {Op.PULL: weights, Op.PUSH: gradients}


def windowed(exchanges: Sequence[Instruction], outline: Outline) -> list[Instruction]:
    """Make every pull or push wait until its bucket fits in the limit; a single bucket always fits."""
    room = outline.room(exchange.target for exchange in exchanges)
    result = []
    under_way: deque[str] = deque()
    size = 0
    for exchange in exchanges:
        size += outline.sizes[bucket_of(exchange.target)]
        over = []
        while under_way and size > room:
            first = under_way.popleft()
            size -= outline.sizes[bucket_of(first)]
            over.append(NAMED[exchange.op](first))
        under_way.append(exchange.target)
        result.append(_behind(exchange, over))
    return result


def _behind(exchange: Instruction, over: Sequence[Value]) -> Instruction:
    return Instruction(exchange.op, exchange.target, reads=exchange.reads, writes=exchange.writes, after=tuple(over))


def interleaved(pulls: Sequence[Instruction], work: Sequence[Instruction]) -> list[Instruction]:
    """Put pulls before a rank's work, except that each forward follows the first pull that waits for that forward's
    weights.

    Only a first stage runs forwards between pulls; a later stage would have to wait for a hidden state.
    """
    first = _first_forwards(work)
    arrived: set[Value] = set()
    placed: list[Instruction] = []
    at = 0
    for pull in pulls:
        placed.append(pull)
        arrived.update(pull.after)
        while arrived and at < first and _pulled(work[at]) <= arrived:
            placed.append(work[at])
            at += 1
    return [*placed, *work[at:]]


def _first_forwards(work: Sequence[Instruction]) -> int:
    for i, instruction in enumerate(work):
        if instruction.op is not Op.SEND and (instruction.op, instruction.micro_batch) != (
            Op.FORWARD,
            work[0].micro_batch,
        ):
            return i
    return len(work)


def _pulled(instruction: Instruction) -> set[Value]:
    return {value for value in instruction.reads if value.kind is ValueKind.WEIGHTS}


def free_to_wait(work: Sequence[Instruction], first_stage: bool) -> int:
    """Return the first index in a rank's work where waiting for pushes delays no other rank.

    On later stages, return the end of the work, because not all ranks of a stage send.
    """
    last = -1
    for i, instruction in enumerate(work):
        if instruction.stream is Stream.P2P or not first_stage:
            last = i
    return last + 1

"""Window: which earlier exchanges must be over before the next one begins, so that few bytes are in flight.

Every rank enters the exchanges of weights in one order, and those of gradients in one order, and waits at the same
places. With blocks of equal size and a window of two of them:

    pull     W.layer.0 = link home -> here
    pull     W.layer.1 = link home -> here
    pull     W.layer.2 = link home -> here                      after W.layer.0
    pull     W.layer.3 = link home -> here                      after W.layer.1

Where a rank may wait like this without two ranks waiting for each other, `ir.deadlock` says and `passes.overlap` keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.value import Value, ValueKind, gradients, weights

NAMED: Mapping[Op, Callable[[str], Value]] = {Op.PULL: weights, Op.PUSH: gradients}


def windowed(exchanges: Sequence[Instruction], outline: Outline) -> list[Instruction]:
    """Let every pull or push of a sequence wait until there is room for it; a bucket that is alone always has room."""
    result = []
    under_way: deque[str] = deque()
    size = 0
    for exchange in exchanges:
        size += outline.sizes[exchange.target]
        over = []
        while under_way and size > outline.in_flight:
            first = under_way.popleft()
            size -= outline.sizes[first]
            over.append(NAMED[exchange.op](first))
        under_way.append(exchange.target)
        result.append(_behind(exchange, over))
    return result


def _behind(exchange: Instruction, over: Sequence[Value]) -> Instruction:
    return Instruction(exchange.op, exchange.target, reads=exchange.reads, writes=exchange.writes, after=tuple(over))


def interleaved(pulls: Sequence[Instruction], work: Sequence[Instruction]) -> list[Instruction]:
    """Put pulls in front of a rank's work; the first micro-batch's forwards between them where they wait for no rank.

    A pull that waits for the weights of a block is followed by the block's forward, during which it is under way. Only
    a first stage computes between pulls: a later one would wait for a hidden state, and others for it.
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
    """Return how many instructions at the beginning are the first micro-batch's forwards, and sends behind them."""
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
    """Return the index in a rank's work from which on it may wait for others' pushes: nobody waits for it any more.

    That is behind its last message. What a stage sends ends its work, though not all of its ranks send: unless it is a
    first stage, all of them go by the end of computing.
    """
    last = -1
    for i, instruction in enumerate(work):
        if instruction.stream is Stream.P2P or not first_stage:
            last = i
    return last + 1

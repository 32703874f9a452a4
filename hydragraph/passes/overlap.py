"""Overlap: weights in, gradients out and receives, placed so that they run while the rank computes.

Exchanges of weights and of gradients are grouped operations: every rank enters all of them, in one order, also for
buckets it does not hold, because its home shard takes part. Entering one does not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op, RankProgram, Stream
from hydragraph.ir.outline import Mode
from hydragraph.passes.place import Placement


def overlap(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Add pulls, pushes (to train), commit and update (to train), post receives early, and set what waits for what.

    Pulls come first, in block order. Pushes of what is not frozen follow in reverse. The commit reads what it ends: the
    losses, which it sums, and the gradients, whose pushes it waits for.
    """
    held = placement.held(program.rank)
    buckets = tuple(bucket for bucket, _ in placement.holders)
    work = _post_early(program.instructions)
    pulls = [
        Instruction(Op.PULL, Stream.PULL, bucket, writes=(f"W.{bucket}",) if bucket in held else ())
        for bucket in buckets
    ]
    losses = tuple(value for each in work for value in each.writes if value.startswith("loss."))
    if mode == "evaluate":
        return replace(program, instructions=_with_waits([*pulls, *work, _commit(losses)]))
    pushes = [
        Instruction(Op.PUSH, Stream.PUSH, bucket, reads=(f"G.{bucket}",) if bucket in held else ())
        for bucket in reversed(buckets)
        if bucket not in placement.outline.frozen
    ]
    gradients = tuple(value for push in pushes for value in push.reads)
    end = (_commit(losses + gradients), Instruction(Op.UPDATE, Stream.COMPUTE))
    return replace(program, instructions=_with_waits([*pulls, *_with_pushes(work, pushes), *end]))


def _commit(reads: tuple[str, ...]) -> Instruction:
    return Instruction(Op.COMMIT, Stream.COMPUTE, reads=reads)


def _post_early(work: Sequence[Instruction]) -> list[Instruction]:
    """Post a forward's receive before the backward that precedes it, so that the transfer runs meanwhile.

    Safe even if a receive blocked its rank: the value needs nothing of that backward. With w = S - 1 - s, stage s runs
    F(m), B(m - w), F(m + 1), and stage s - 1 sends what F(m + 1) needs before it asks for the result of B(m - w).
    Only forward receives move: if both kinds did, the two stages would each wait for the other to send first.
    """
    early: list[Instruction] = []
    for instruction in work:
        at = len(early)
        if instruction.op is Op.RECEIVE:
            while at > 0 and early[at - 1].op is Op.SEND:
                at -= 1
            sends = at
            while at > 0 and early[at - 1].op is Op.BACKWARD:
                at -= 1
            if at == sends or not instruction.writes[0].startswith("h"):
                at = len(early)
        early.insert(at, instruction)
    return early


def _with_pushes(work: Sequence[Instruction], pushes: Sequence[Instruction]) -> list[Instruction]:
    """Insert the pushes in the order given, each as soon as its gradient is complete and those before it are issued.

    They go before the next computation, not right behind the last one, because a send that another stage waits for
    should leave first. Pushes of others' buckets wait for the rank's last forward: no gradient is complete earlier.
    """
    complete = {value: i for i, each in enumerate(work) if each.op is Op.BACKWARD for value in each.writes}
    last_forward = max((i for i, each in enumerate(work) if each.op is Op.FORWARD), default=-1)
    placed: list[Instruction] = []
    issued = 0
    for i, instruction in enumerate(work):
        if instruction.stream is Stream.COMPUTE and i > last_forward:
            while issued < len(pushes) and all(complete[value] < i for value in pushes[issued].reads):
                placed.append(pushes[issued])
                issued += 1
        placed.append(instruction)
    return [*placed, *pushes[issued:]]


def _with_waits(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Set each instruction's `after`: those of its reads that another stream made."""
    maker: dict[str, Stream] = {}
    waiting: list[Instruction] = []
    for each in instructions:
        after = tuple(value for value in each.reads if maker[value] is not each.stream)
        waiting.append(replace(each, after=after) if after else each)
        maker.update(dict.fromkeys(each.writes, each.stream))
    return tuple(waiting)

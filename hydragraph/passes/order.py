"""Order: the compute and point-to-point instructions of one rank, in the order of the pipeline schedule.

Each action of the schedule (`ir.schedules`) becomes the forward, the backward or a half of the backward of one
micro-batch through the stage's blocks, with the messages that it needs and makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.value import (
    Value,
    activation,
    activation_gradient,
    aux,
    gradients,
    loss,
    message,
    postponed,
    saved,
    weights,
)
from hydragraph.passes.place import PlacedRole, PlacedStage, Placement


def order(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Fill a rank's empty program with forwards, backwards (to train), sends and receives.

    A stage of u ranks receives values from one of t ranks as follows: receiver j receives from sender j mod t, so every
    sender serves its receivers in order, and if there are fewer receivers some senders have none.
    """
    stage = placement.stage_of.get(program.rank)
    if stage is None:
        return program
    instructions: list[Instruction] = []
    for action in placement.actions(stage, mode):
        role = stage.role_of(action.micro_batch)
        if action.work is Work.FORWARD:
            instructions += _forward(placement.outline, stage, role, program.rank, action.micro_batch, mode)
        else:
            instructions += _backward(placement.outline, stage, role, program.rank, action.micro_batch, action.work)
    return replace(program, instructions=tuple(instructions))


def _forward(
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, mode: Mode
) -> Iterator[Instruction]:
    """Run the stage's blocks in order on micro-batch m, after posting the receive of its input."""
    first, last = stage.blocks
    yield from _receive(activation(first - 1, m), role.previous, stage, rank)
    yield Instruction(Op.FORWARD, "aux", m, writes=(aux(m),))
    for k in range(first, last):
        block = outline.blocks[k]
        hidden = (activation(k - 1, m),) if k > 0 else ()
        output = activation(k, m) if k + 1 < len(outline.blocks) else loss(m)
        kept = (saved(block, m),) if mode != "evaluate" and k >= outline.lowest else ()
        reads = (*_weights(outline, block), *hidden, aux(m))
        yield Instruction(Op.FORWARD, block, m, reads=reads, writes=(output, *kept))
    yield from _send(activation(last - 1, m), role.following, stage, rank)


def _backward(
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, work: Work
) -> Iterator[Instruction]:
    """Run the stage's blocks in reverse, down to the lowest with trainable parameters: their backwards or a half.

    A block without one of the halves runs its whole backward in the other: without trainable parameters with the input
    gradients, and the lowest block, which passes no gradient on, with the weight gradients.
    """
    first, last = stage.blocks
    # Below the lowest trainable block no gradient is needed: stages there neither send nor receive any.
    if last <= outline.lowest:
        return
    if work is not Work.WEIGHT_GRADIENT:
        yield from _receive(activation_gradient(last - 1, m), role.following, stage, rank)
    for k in reversed(range(max(first, outline.lowest), last)):
        block = outline.blocks[k]
        gradient = (activation_gradient(k, m),) if k + 1 < len(outline.blocks) else ()
        reads = (saved(block, m), *gradient, *_weights(outline, block))
        below = (activation_gradient(k - 1, m),) if k > outline.lowest else ()
        sums = tuple(gradients(bucket) for bucket in outline.gradients[block])
        later = postponed(block, m)
        if work is Work.BACKWARD or not (below and sums):
            if work is not (Work.WEIGHT_GRADIENT if below else Work.INPUT_GRADIENT):
                yield Instruction(Op.BACKWARD, block, m, reads=reads, writes=(*below, *sums))
        elif work is Work.INPUT_GRADIENT:
            yield Instruction(Op.BACKWARD, block, m, reads=reads, writes=(*below, later))
        else:
            yield Instruction(Op.BACKWARD, block, m, reads=(later, *_weights(outline, block)), writes=sums)
    if first > outline.lowest and work is not Work.WEIGHT_GRADIENT:
        yield from _send(activation_gradient(first - 1, m), role.previous, stage, rank)


def _weights(outline: Outline, block: str) -> tuple[Value, ...]:
    return tuple(weights(bucket) for bucket in outline.weights[block])


def _receive(value: Value, senders: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    if senders:
        peer = senders[stage.ranks.index(rank) % len(senders)]
        yield Instruction(Op.RECEIVE, peer=peer, writes=(value,))


def _send(value: Value, receivers: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    # Every rank of a stage has the whole value; sender i of t serves receivers i, i + t, ..., so that the ranks share
    # the sending.
    for peer in receivers[stage.ranks.index(rank) :: len(stage.ranks)]:
        yield Instruction(Op.SEND, peer=peer, reads=(value,), writes=(message(value, peer),))

"""Order: compute and point-to-point instructions of a rank, in the schedule's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    """Fill a rank's empty program with forwards, backwards (unless the mode is "evaluate"), sends and receives.

    Rank j of a stage receives from rank j mod t of the previous stage, which has t ranks.
    """
    stage = placement.stage_of.get(program.rank)
    if stage is None:
        return program
    instructions = list(_in_order_of_actions(placement, mode, program.rank))
    if {role.previous for role in stage.roles if role.previous} & {role.following for role in stage.roles}:
        instructions = _in_order_of_sends(placement, mode, program.rank, instructions)
    return replace(program, instructions=tuple(instructions))


def _in_order_of_actions(placement: Placement, mode: Mode, rank: int) -> Iterator[Instruction]:
    stage = placement.stage_of[rank]
    for action in placement.actions(stage, mode):
        role = stage.role_of(action.micro_batch, action.visit)
        if action.work is Work.FORWARD:
            yield from _forward(placement.outline, stage, role, rank, action.micro_batch, mode)
        else:
            yield from _backward(placement.outline, stage, role, rank, action.micro_batch, action.work)


def _in_order_of_sends(
    placement: Placement, mode: Mode, rank: int, instructions: Sequence[Instruction]
) -> list[Instruction]:
    """Move receives earlier, into the order of each peer's sends."""
    receives = [i for i, instruction in enumerate(instructions) if instruction.op is Op.RECEIVE]
    # index -> receives that are moved there
    before: defaultdict[int, list[int]] = defaultdict(list)
    for peer in dict.fromkeys(instructions[i].partner for i in receives):
        # at: value -> index of its receive. Visit sends from last to first: a receive moves to the
        # earliest receive of values that the peer sends later. Sent x, y, z, received y, z, x: x
        # moves before y.
        at = {instructions[i].writes[0]: i for i in receives if instructions[i].peer == peer}
        first = len(instructions)
        places = []
        for value in reversed(list(_sent(placement, mode, peer, rank))):
            first = min(first, at[value])
            places.append((first, at[value]))
        for place, i in reversed(places):
            before[place].append(i)
    return [
        instructions[j]
        for i, instruction in enumerate(instructions)
        for j in (before[i] if instruction.op is Op.RECEIVE else [i])
    ]


def _sent(placement: Placement, mode: Mode, sender: int, receiver: int) -> Iterator[Value]:
    for instruction in _in_order_of_actions(placement, mode, sender):
        if instruction.op is Op.SEND and instruction.peer == receiver:
            yield instruction.reads[0]


def _forward(
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, mode: Mode
) -> Iterator[Instruction]:
    first, last = stage.blocks[role.visit]
    yield from _receive(activation(first - 1, m), role.previous, stage, rank)
    # The first visit computes aux values; interleaved stages share them.
    if role.visit == 0:
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
    first, last = stage.blocks[role.visit]
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
        # A backward with one kind of gradient is not split: it runs in the input half if it returns
        # a gradient below, else in the weight half.
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
    # 2 senders, 4 receivers: 0 sends to 0 and 2, and 1 to 1 and 3.
    for peer in receivers[stage.ranks.index(rank) :: len(stage.ranks)]:
        yield Instruction(Op.SEND, peer=peer, reads=(value,), writes=(message(value, peer),))

"""Order: the compute and point-to-point instructions of one rank, in the order of the pipeline schedule.

A rank's work is a list of tasks, each the forward or the backward of one micro-batch through the stage, in the order of
the clock (`passes.clock`). 1F1B runs min(M, S - 1 - s) forwards ahead on stage s of S, then alternates, then drains: at
most S - s micro-batches of a pipeline are alive. GPipe runs all forwards, then all backwards. Both run a pipeline's
micro-batches in ascending order, so that they add up gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, activation, activation_gradient, aux, gradients, loss, message, saved, weights
from hydragraph.passes.place import PlacedRole, PlacedStage, Placement

Task = tuple[Op, int]


def order(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Fill a rank's empty program with forwards, backwards (to train), sends and receives.

    A stage of u ranks takes values from one of t ranks as follows: receiver j takes from sender j mod t, so every
    sender serves its receivers in order, and a stage with fewer receivers leaves some senders without any.
    """
    stage = placement.stage_of.get(program.rank)
    if stage is None:
        return program
    instructions: list[Instruction] = []
    for op, micro_batch in tasks(placement, stage, mode):
        run = _forward if op is Op.FORWARD else _backward
        role = stage.role_of(micro_batch)
        instructions += run(placement.outline, stage, role, program.rank, micro_batch, mode)
    return replace(program, instructions=tuple(instructions))


def tasks(placement: Placement, stage: PlacedStage, mode: Mode) -> tuple[Task, ...]:
    """Return a stage's (forward or backward, micro-batch) tasks in order."""
    beats = placement.beats(stage)
    of_pipelines = [(beats[role.pipeline], role.micro_batches) for role in stage.roles]
    # At the same time by the clock a backward comes first, which makes room; then the order is that of the pipelines.
    forwards = [(beat.forward_at(m), 1, (Op.FORWARD, m)) for beat, numbers in of_pipelines for m in numbers]
    backwards = [(beat.backward_at(m), 0, (Op.BACKWARD, m)) for beat, numbers in of_pipelines for m in numbers]
    forwards.sort(key=itemgetter(0))
    if mode == "evaluate":
        in_order = forwards
    elif placement.schedule == "gpipe":
        in_order = [*forwards, *sorted(backwards, key=itemgetter(0))]
    elif not stage.roles[0].following:
        # On the last stage a backward waits for nothing but its own forward: no two micro-batches are alive.
        return tuple((op, m) for _, _, (_, m) in forwards for op in (Op.FORWARD, Op.BACKWARD))
    else:
        in_order = sorted([*forwards, *backwards], key=itemgetter(0, 1))
    return tuple(task for _, _, task in in_order)


def _forward(
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, mode: Mode
) -> Iterator[Instruction]:
    """Run the stage's blocks in order on micro-batch m; the received value is asked for before all else."""
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
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, mode: Mode
) -> Iterator[Instruction]:
    """Run the stage's blocks in reverse, down to the lowest that learns; in mode "evaluate" there is none."""
    first, last = stage.blocks
    # Below the lowest block that learns nobody needs a gradient: stages there send and receive none.
    if last <= outline.lowest:
        return
    yield from _receive(activation_gradient(last - 1, m), role.following, stage, rank)
    for k in reversed(range(max(first, outline.lowest), last)):
        block = outline.blocks[k]
        gradient = (activation_gradient(k, m),) if k + 1 < len(outline.blocks) else ()
        reads = (saved(block, m), *gradient, *_weights(outline, block))
        below = (activation_gradient(k - 1, m),) if k > outline.lowest else ()
        writes = (*below, *(gradients(bucket) for bucket in outline.gradients[block]))
        yield Instruction(Op.BACKWARD, block, m, reads=reads, writes=writes)
    if first > outline.lowest:
        yield from _send(activation_gradient(first - 1, m), role.previous, stage, rank)


def _weights(outline: Outline, block: str) -> tuple[Value, ...]:
    return tuple(weights(bucket) for bucket in outline.weights[block])


def _receive(value: Value, senders: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    if senders:
        peer = senders[stage.ranks.index(rank) % len(senders)]
        yield Instruction(Op.RECEIVE, peer=peer, writes=(value,))


def _send(value: Value, receivers: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    # Every rank of a stage has the whole value; sender i of t serves receivers i, i + t, ..., so none of them is idle
    # while another one sends to all.
    for peer in receivers[stage.ranks.index(rank) :: len(stage.ranks)]:
        yield Instruction(Op.SEND, peer=peer, reads=(value,), writes=(message(value, peer),))

"""Order: the compute and point-to-point instructions of one rank, in the order of the pipeline schedule.

A rank's work is a list of tasks, each the forward or the backward of one micro-batch through the stage, ordered by the
clock (`ir.schedules.clock`). 1F1B runs min(M, S - 1 - s) forwards ahead on stage s of S, then alternates, then drains:
at most S - s micro-batches of a pipeline are alive. GPipe runs all forwards, then all backwards. Both run a pipeline's
micro-batches in ascending order, so that they sum gradients in the same order.
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

    A stage of u ranks receives values from one of t ranks as follows: receiver j receives from sender j mod t, so every
    sender serves its receivers in order, and if there are fewer receivers some senders have none.
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
    # At equal clock times a backward comes first, to free memory; ties are then broken by the order of pipelines.
    forwards = [(beat.forward_at(m), 1, (Op.FORWARD, m)) for beat, numbers in of_pipelines for m in numbers]
    backwards = [(beat.backward_at(m), 0, (Op.BACKWARD, m)) for beat, numbers in of_pipelines for m in numbers]
    forwards.sort(key=itemgetter(0))
    if mode == "evaluate":
        in_order = forwards
    elif placement.schedule == "gpipe":
        in_order = [*forwards, *sorted(backwards, key=itemgetter(0))]
    elif not stage.roles[0].following:
        # On the last stage a backward only waits for its own forward: at most one micro-batch is alive.
        return tuple((op, m) for _, _, (_, m) in forwards for op in (Op.FORWARD, Op.BACKWARD))
    else:
        in_order = sorted([*forwards, *backwards], key=itemgetter(0, 1))
    return tuple(task for _, _, task in in_order)


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
    outline: Outline, stage: PlacedStage, role: PlacedRole, rank: int, m: int, mode: Mode
) -> Iterator[Instruction]:
    """Run the stage's blocks in reverse, down to the lowest with trainable parameters; not used in mode "evaluate"."""
    first, last = stage.blocks
    # Below the lowest trainable block no gradient is needed: stages there neither send nor receive any.
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
    # Every rank of a stage has the whole value; sender i of t serves receivers i, i + t, ..., so that the ranks share
    # the sending.
    for peer in receivers[stage.ranks.index(rank) :: len(stage.ranks)]:
        yield Instruction(Op.SEND, peer=peer, reads=(value,), writes=(message(value, peer),))

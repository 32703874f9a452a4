"""Order: the compute and point-to-point instructions of one rank, in the order of the pipeline schedule.

A rank's work is a list of tasks, each the forward or the backward of one micro-batch through the stage. 1F1B runs
min(M, S - 1 - s) forwards ahead on stage s of S, then alternates, then drains: at most S - s micro-batches are alive.
GPipe runs all forwards, then all backwards. Both run micro-batches in ascending order, so that they add up gradients
in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op, RankProgram, Stream
from hydragraph.ir.outline import Mode, Outline
from hydragraph.passes.place import PlacedStage, Placement

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
    for op, micro_batch in tasks(placement.schedule, stage, mode):
        run = _forward if op is Op.FORWARD else _backward
        instructions += run(placement.outline, stage, program.rank, micro_batch, mode)
    return replace(program, instructions=tuple(instructions))


def tasks(schedule: str, stage: PlacedStage, mode: Mode) -> tuple[Task, ...]:
    """Return a stage's (forward or backward, micro-batch) tasks in order."""
    count = stage.micro_batches
    forwards = [(Op.FORWARD, m) for m in range(count)]
    backwards = [(Op.BACKWARD, m) for m in range(count)]
    if mode == "evaluate":
        return tuple(forwards)
    if schedule == "gpipe":
        return (*forwards, *backwards)
    ahead = min(count, stage.depth - 1 - stage.stage)
    steady = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
    return (*forwards[:ahead], *steady, *backwards[count - ahead :])


def _forward(outline: Outline, stage: PlacedStage, rank: int, m: int, mode: Mode) -> Iterator[Instruction]:
    """Run the stage's blocks in order on micro-batch m; the received value is asked for before all else."""
    first, last = stage.blocks
    yield from _receive(f"h{first - 1}.{m}", stage.previous, stage, rank)
    yield Instruction(Op.FORWARD, Stream.COMPUTE, "aux", m, writes=(f"a.{m}",))
    for k in range(first, last):
        block = outline.blocks[k]
        hidden = (f"h{k - 1}.{m}",) if k > 0 else ()
        output = f"h{k}.{m}" if k + 1 < len(outline.blocks) else f"loss.{m}"
        saved = (f"s.{block}.{m}",) if mode == "train" and k >= outline.lowest else ()
        reads = (*_weights(outline, block), *hidden, f"a.{m}")
        yield Instruction(Op.FORWARD, Stream.COMPUTE, block, m, reads=reads, writes=(output, *saved))
    yield from _send(f"h{last - 1}.{m}", stage.following, stage, rank)


def _backward(outline: Outline, stage: PlacedStage, rank: int, m: int, mode: Mode) -> Iterator[Instruction]:
    """Run the stage's blocks in reverse, down to the lowest that learns; only in mode "train" is there any."""
    first, last = stage.blocks
    if last <= outline.lowest:
        return
    yield from _receive(f"d{last - 1}.{m}", stage.following, stage, rank)
    for k in reversed(range(max(first, outline.lowest), last)):
        block = outline.blocks[k]
        gradient = (f"d{k}.{m}",) if k + 1 < len(outline.blocks) else ()
        reads = (f"s.{block}.{m}", *gradient, *_weights(outline, block))
        below = (f"d{k - 1}.{m}",) if k > outline.lowest else ()
        writes = (*below, *(f"G.{bucket}" for bucket in outline.gradients[block]))
        yield Instruction(Op.BACKWARD, Stream.COMPUTE, block, m, reads=reads, writes=writes)
    if first > outline.lowest:
        yield from _send(f"d{first - 1}.{m}", stage.previous, stage, rank)


def _weights(outline: Outline, block: str) -> tuple[str, ...]:
    return tuple(f"W.{bucket}" for bucket in outline.weights[block])


def _receive(value: str, senders: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    if senders:
        peer = senders[stage.ranks.index(rank) % len(senders)]
        yield Instruction(Op.RECEIVE, Stream.P2P, peer=peer, writes=(value,))


def _send(value: str, receivers: tuple[int, ...], stage: PlacedStage, rank: int) -> Iterator[Instruction]:
    for peer in receivers[stage.ranks.index(rank) :: len(stage.ranks)]:
        yield Instruction(Op.SEND, Stream.P2P, peer=peer, reads=(value,))

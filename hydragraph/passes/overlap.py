"""Overlap: placement of pulls, pushes, receives and waits for sends, to overlap communication with computation.

Every rank enters all pulls and pushes, in the same order, without blocking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op, Stream, waits
from hydragraph.ir.program_outline import Mode
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind, activation, activation_gradient
from hydragraph.passes.bytes_in_flight import free_to_wait, interleaved
from hydragraph.passes.place import Placement
from hydragraph.passes.stream import exchanges


def overlap(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Add pulls, pushes, the commit and the update, post receives early, and make instructions wait for inputs.

    Pulls come first, in block order. Pushes of trainable buckets follow in reverse order. Messages in flight are freed
    before the commit.
    """
    # Early receives would delay pulls and pushes
    if placement.streams:
        placed = _with_ends(placement, program.rank, program.instructions)
    else:
        placed = _with_exchanges(placement, mode, program)
    losses = tuple(value for instruction in placed for value in instruction.writes if value.kind is ValueKind.LOSS)
    totals = tuple(value for instruction in placed if instruction.op is Op.PUSH for value in instruction.reads)
    update = (Instruction(Op.UPDATE),) if mode == "train" else ()
    commit = Instruction(Op.COMMIT, reads=(*losses, *totals))
    return replace(program, instructions=_with_waits([*placed, commit, *update]))


def _with_exchanges(placement: Placement, mode: Mode, program: RankProgram) -> list[Instruction]:
    stage = placement.stage_of.get(program.rank)
    work = _post_early(placement, program)
    entered = exchanges(placement, mode, program.rank)
    pulls, pushes = ([exchange for exchange in entered if exchange.op is op] for op in (Op.PULL, Op.PUSH))
    free = free_to_wait(work, stage is None or not any(role.previous for role in stage.roles))
    return interleaved(pulls, _with_ends(placement, program.rank, _with_pushes(work, pushes, free)))


def _post_early(placement: Placement, program: RankProgram) -> list[Instruction]:
    """Post a forward's receive before the preceding backward, to overlap the transfer.

    Even a blocking receive is safe, because the previous stage runs the forward first. If receives of gradients were
    moved, two stages could wait for each other.
    """
    early: list[Instruction] = []
    for instruction in program.instructions:
        early.insert(_earliest(placement, program.rank, early, instruction), instruction)
    return early


def _earliest(placement: Placement, rank: int, before: Sequence[Instruction], instruction: Instruction) -> int:
    if instruction.op is not Op.RECEIVE or instruction.writes[0].kind is not ValueKind.ACTIVATION:
        return len(before)
    # Only a receive after a backward (and perhaps its sends) can move.
    at = len(before)
    while at > 0 and before[at - 1].op is Op.SEND:
        at -= 1
    if at == 0 or before[at - 1].op is not Op.BACKWARD:
        return len(before)
    coming = instruction.writes[0].micro_batch
    going = before[at - 1].micro_batch
    stage = placement.stage_of[rank]
    # In clock order, the previous stage must run the forward before the backward that uses this
    # stage's gradient, or else the stages could wait for each other.
    beats = placement.beats(stage)
    assert going is not None, "a backward needs a micro-batch"
    here, there = instruction.writes[0].position + 1, placement.outline.index[before[at - 1].target]
    arrives = beats[stage.role_of(coming, stage.visit_of(here))].arrives_at(coming)
    if arrives >= beats[stage.role_of(going, stage.visit_of(there))].returns_at(going):
        return len(before)
    # Pass all blocks of the backward.
    while at > 0 and before[at - 1].op is Op.BACKWARD and before[at - 1].micro_batch == going:
        at -= 1
    return at


def _with_pushes(work: Sequence[Instruction], pushes: Sequence[Instruction], free: int) -> list[Instruction]:
    """Insert pushes in order, each after the last forward and the backwards that compute its gradients.

    Args:
        free: first index of pushes that wait for earlier pushes.
    """
    # complete: gradient -> index of the last backward that adds to it.
    complete = {
        value: i for i, instruction in enumerate(work) if instruction.op is Op.BACKWARD for value in instruction.writes
    }
    # A push between forwards would take bandwidth from awaited activations.
    last_forward = max((i for i, instruction in enumerate(work) if instruction.op is Op.FORWARD), default=-1)
    placed: list[Instruction] = []
    issued = 0
    for i, instruction in enumerate(work):
        if instruction.stream is Stream.COMPUTE and i > last_forward:
            # Pushes keep their order, so one delays all later ones.
            while (
                issued < len(pushes)
                and all(complete[value] < i for value in pushes[issued].reads)
                and (i >= free or not pushes[issued].after)
            ):
                placed.append(pushes[issued])
                issued += 1
        placed.append(instruction)
    return [*placed, *pushes[issued:]]


def _with_ends(placement: Placement, rank: int, work: Sequence[Instruction]) -> list[Instruction]:
    """Free messages where they have certainly been sent, so that waiting for sends delays no rank.

    Only a wait shows that a gloo send has completed. h{k}.{m} is the hidden state of micro-batch m after block k, and
    d{k}.{m} is its gradient.
    - The wait for h{k}.{m} precedes the backward that reads d{k}.{m}, because the next stage computes d{k}.{m} from
      h{k}.{m}.
    - The wait for d{k}.{m} precedes the pipeline's send of d{k}.{m + 2}, which follows the previous stage's backward of
      micro-batch m. With interleaved stages and sets of n micro-batches (`ir.schedules.clock`), it is the send of
      d{k}.{m + n}.
    """
    ended: list[Instruction] = []
    sent: defaultdict[Value, list[Value]] = defaultdict(list)
    for instruction in work:
        before: list[Value] = []
        if instruction.op is Op.BACKWARD:
            for value in instruction.reads:
                if value.kind is ValueKind.ACTIVATION_GRADIENT:
                    before += sent.pop(activation(value.position, value.micro_batch), [])
        elif instruction.op is Op.SEND and instruction.reads[0].kind is ValueKind.ACTIVATION_GRADIENT:
            (value,) = instruction.reads
            stage = placement.stage_of[rank]
            role = stage.role_of(value.micro_batch, stage.visit_of(value.position + 1))
            left = value.micro_batch - max(2, placement.beats(stage)[role].set)
            if left in role.micro_batches:
                before += sent.pop(activation_gradient(value.position, left), [])
        if before:
            ended.append(Instruction(Op.FREE, reads=tuple(before)))
        if instruction.op is Op.SEND:
            sent[instruction.reads[0]] += instruction.writes
        ended.append(instruction)
    last = tuple(message for messages in sent.values() for message in messages)
    return [*ended, Instruction(Op.FREE, reads=last)] if last else ended


def _with_waits(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    stream_of: dict[Value, Stream] = {}
    waiting: list[Instruction] = []
    for instruction in instructions:
        after = (*waits(instruction, stream_of), *instruction.after)
        waiting.append(instruction.waiting_for(after) if after else instruction)
        stream_of.update(dict.fromkeys(instruction.writes, instruction.stream))
    return tuple(waiting)

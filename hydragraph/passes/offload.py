"""Offload: move saved values to host memory, and fetch them one computation before the backward that reads them.

An offloading stage's device holds only the saved values of two blocks, and values whose backward follows soon.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind, copying, fetched, offloaded
from hydragraph.passes.place import Placement

# Bytes whose transfer takes as long as a copy's fixed cost
SMALL_BYTES = 1 << 16


def moves(size: int) -> bool:
    return size > SMALL_BYTES


def offload(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Copy an offloading stage's saved values to host memory and back, and free their device memory."""
    stage = placement.stage_of.get(program.rank)
    if stage is None or not stage.offload:
        return program
    computing = [i for i in program.instructions if i.op in (Op.FORWARD, Op.BACKWARD) and i.target != "aux"]
    made: dict[Value, int] = {}
    offloads: dict[int, Instruction] = {}  # index of a forward -> offload after it
    # index of a computation -> instructions that precede it.
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    for number, computation in enumerate(computing):
        made.update((value, number) for value in computation.writes if value.kind is ValueKind.SAVED)
        for value in computation.reads:
            # The value must be away for at least one computation.
            if value.kind is ValueKind.SAVED and number - made[value] > 3:
                # Computation i saves the value, and n reads it. The copy overlaps with i + 1, the
                # value is away during i + 2 to n - 2, and the fetch overlaps with n - 1.
                of = (value.block, value.micro_batch)
                host, leaving, back = (make(*of) for make in (offloaded, copying, fetched))
                offloads[made[value]] = Instruction(
                    Op.OFFLOAD, *of, reads=(value,), writes=(host, leaving), after=(value,)
                )
                # Free before fetches at the same place, to make room.
                before[made[value] + 2].insert(0, Instruction(Op.FREE, reads=(leaving,), after=(leaving,)))
                before[number - 1].append(Instruction(Op.FETCH, *of, reads=(host,), writes=(back,)))
                reads = tuple(back if read == value else read for read in computation.reads)
                computation = replace(computation, reads=reads, after=(*computation.after, back))
                computing[number] = computation
    # Insert the new instructions; computations have new reads.
    placed: list[Instruction] = []
    number = 0
    for instruction in program.instructions:
        if instruction.op in (Op.FORWARD, Op.BACKWARD) and instruction.target != "aux":
            placed += [*before[number], computing[number]]
            placed += [offloads[number]] if number in offloads else []
            number += 1
        else:
            placed.append(instruction)
    return replace(program, instructions=tuple(placed))

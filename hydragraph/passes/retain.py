"""Retain: keep every value until its last use and no longer."""

from __future__ import annotations

from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op, RankProgram, Stream
from hydragraph.ir.outline import Mode
from hydragraph.passes.place import Placement


def retain(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Add one `free` behind every instruction that is the last to use some values.

    A free waits for nothing (its `after` is empty): it tells the runtime that no later instruction names the values.
    What a send still has in flight, the runtime keeps until it has left. Gradients live until the commit, which waits
    for their pushes. At the end nothing is alive but the home state.
    """
    del placement, mode  # every pass has the same signature; this one needs only the program
    last = {value: i for i, each in enumerate(program.instructions) for value in (*each.reads, *each.writes)}
    kept: list[Instruction] = []
    for i, each in enumerate(program.instructions):
        kept.append(each)
        dead = tuple(value for value in dict.fromkeys((*each.reads, *each.writes)) if last[value] == i)
        if dead:
            kept.append(Instruction(Op.FREE, Stream.COMPUTE, reads=dead))
    return replace(program, instructions=tuple(kept))

"""Retain: keep every value until its last use and no longer.

A freed value stays in memory until messages that contain it are sent.
"""

from __future__ import annotations

from dataclasses import replace

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value
from hydragraph.passes.place import Placement


def retain(placement: Placement, mode: Mode, program: RankProgram) -> RankProgram:
    """Add a `free` instruction after the last use of every value."""
    last_use: dict[Value, int] = {}
    for i, instruction in enumerate(program.instructions):
        last_use.update(dict.fromkeys((*instruction.reads, *instruction.writes), i))
    kept: list[Instruction] = []
    for i, instruction in enumerate(program.instructions):
        kept.append(instruction)
        if instruction.op is Op.FREE:
            continue
        used = dict.fromkeys((*instruction.reads, *instruction.writes))
        dead = tuple(value for value in used if last_use[value] == i)
        if dead:
            kept.append(Instruction(Op.FREE, reads=dead))
    return replace(program, instructions=tuple(kept))

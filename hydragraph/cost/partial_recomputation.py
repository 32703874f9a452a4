"""Cost of a block that recomputes within a memory budget, from its costs without and with full recomputation.

    b    the memory budget
    s    fraction of full recomputation's operations that the block repeats; without graphs, 1 - b

The backward takes longer by s times the seconds that full recomputation adds, without attention, whose results are
always saved. The block saves the fraction b of the bytes that it saves without recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hydragraph.cost.block_pieces import AUX, BlockPiece, MemoryLines
from hydragraph.cost.curves import Constants


def within_budget(
    plain: Mapping[str, BlockPiece], full: Mapping[str, BlockPiece], budget: float, shares: Mapping[str, float]
) -> dict[str, BlockPiece]:
    return {
        template: piece if template == AUX else _within(piece, full[template], budget, shares[template])
        for template, piece in plain.items()
    }


def _within(plain: BlockPiece, full: BlockPiece, budget: float, share: float) -> BlockPiece:
    held = None if plain.held is None or full.held is None else _held(plain.held, full.held, budget)
    return replace(plain, backward=_between(plain.backward, full.backward, share), held=held)


def _between(before: Constants, after: Constants, share: float) -> Constants:
    return Constants(
        before.a, before.b + share * (after.b - before.b), before.c + share * (after.c - before.c), before.near
    )


def _held(plain: MemoryLines, full: MemoryLines, budget: float) -> MemoryLines:
    saved = (budget * plain.saved[0], budget * plain.saved[1])
    return replace(full, saved=saved, forward=plain.forward, keeps=tuple(sorted({*plain.keeps, *full.keeps})))

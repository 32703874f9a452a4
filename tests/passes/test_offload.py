"""Offload: every saved value is on the device while two blocks need it, and in host memory in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import RankProgram, parse, to_text
from hydragraph.ir.value import ValueKind
from hydragraph.ir.verify import VerificationError, verify
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import check_golden, model

LAYERS = 6
BLOCKS = ("embed", *(f"layer.{i}" for i in range(LAYERS)), "head")
MODEL = Outline(BLOCKS, tuple((block, (block,)) for block in BLOCKS))


def programs(text: str, count: int = 1, mode: str = "train") -> tuple[RankProgram, ...]:
    strategy = Strategy.parse(text, LAYERS)
    counts = [count] * len(strategy.pipelines)
    return rank_programs(MODEL, strategy, counts, mode, ranks=max(strategy.devices) + 1)  # pyrefly: ignore[bad-argument-type]


def on_device(program: RankProgram) -> list[int]:
    """Return, for every computation, the number of blocks whose saved values are on the device."""
    there: set[str] = set()
    found = []
    for instruction in program.instructions:
        values = (v for v in instruction.writes if v.kind in (ValueKind.SAVED, ValueKind.COPYING, ValueKind.FETCHED))
        if instruction.op is Op.OFFLOAD:
            there.discard(instruction.reads[0])  # counted as the copy
        there.update(values)
        there -= {*instruction.reads} if instruction.op is Op.FREE else set()
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            found.append(len(there))
    return found


@pytest.mark.parametrize("text", ["<tp1,pp1>o", "<tp2,pp2>o gpipe", "<tp1,pp3>wo", "<tp1,pp3,v2>o", "2*<tp1,pp2>sro"])
@pytest.mark.parametrize("count", [1, 4])
def test_programs_verify(text: str, count: int) -> None:
    for mode in ("train", "gradients", "evaluate"):
        built = programs(text, count, mode)
        verify(built, MODEL, mode)
        assert all(parse(to_text(program)) == program for program in built)


def test_two_blocks_are_on_the_device() -> None:
    # Beyond what a forward is about to save.
    assert max(on_device(programs("<tp1,pp1>o")[0])) == 2
    assert max(on_device(programs("<tp1,pp1>")[0])) == len(BLOCKS)
    assert max(on_device(programs("<tp1,pp2>o", 6)[0])) <= 4  # two that are copied out, two back


def test_golden_text_of_a_stage_that_offloads_and_one_that_does_not() -> None:
    strategy = Strategy.parse("<[0]x2o,[1]x1>", layers=3)
    built = rank_programs(model(3), strategy, [2], ranks=2)
    verify(built, model(3))
    check_golden("offload", "\n".join(map(to_text, built)))


def test_a_value_whose_backward_follows_closely_stays() -> None:
    moved = [i.target for i in programs("<tp1,pp1>o")[0].instructions if i.op is Op.OFFLOAD]
    assert moved == list(BLOCKS[:-2])


def test_an_evaluation_and_other_stages_offload_nothing() -> None:
    assert (
        programs("<tp1,pp1>o", mode="evaluate")[0].instructions
        == programs("<tp1,pp1>", mode="evaluate")[0].instructions
    )
    assert not any(i.op in (Op.OFFLOAD, Op.FETCH) for i in programs("<[0]x3o,[1]x3>", 4)[1].instructions)


def test_halved_backwards_are_refused() -> None:
    with pytest.raises(hg.Unsupported, match=r"offloading stages under schedule zb-h1.*leave out o"):
        programs("<tp1,pp2>o zb-h1")


def without(program: RankProgram, op: Op) -> RankProgram:
    at = next(i for i, instruction in enumerate(program.instructions) if instruction.op is op)
    return replace(program, instructions=(*program.instructions[:at], *program.instructions[at + 1 :]))


def other(program: RankProgram, op: Op, **fields: object) -> RankProgram:
    at = next(i for i, instruction in enumerate(program.instructions) if instruction.op is op)
    changed: Instruction = replace(program.instructions[at], **fields)  # pyrefly: ignore[bad-argument-type]
    return replace(program, instructions=(*program.instructions[:at], changed, *program.instructions[at + 1 :]))


def test_broken_copies_are_found() -> None:
    (program,) = programs("<tp1,pp1>o")
    for broken, what in (
        (without(program, Op.FETCH), "no earlier instruction makes it"),
        (without(program, Op.OFFLOAD), "no earlier instruction makes it"),
        (other(program, Op.OFFLOAD, after=()), "should wait for the values that it reads from other streams"),
        (other(program, Op.FETCH, target="layer.5"), "this instruction should fetch only its block's saved values"),
        (other(program, Op.OFFLOAD, micro_batch=3), "this instruction should offload only its block's saved values"),
    ):
        with pytest.raises(VerificationError, match=what):
            verify((broken,), MODEL)

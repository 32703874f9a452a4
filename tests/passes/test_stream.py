"""Streaming: every rank enters the same exchanges, programs cannot deadlock, and weights live for one use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram, parse, to_text
from hydragraph.ir.value import ValueKind, bucket_of
from hydragraph.ir.verify import VerificationError, verify
from hydragraph.passes.pipeline import rank_programs, shared_programs
from hydragraph.passes.place import place
from hydragraph.passes.stream import turns
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import check_golden, model, returning


def test_golden_text_of_a_stage_that_streams_and_one_that_does_not() -> None:
    strategy = Strategy.parse("<[0]x1w,[1]x1g> + <[2]x2>", layers=2)
    programs = rank_programs(model(2), strategy, [1, 1], ranks=3)
    verify(programs, model(2))
    check_golden("stream", "\n".join(map(to_text, programs)))


def test_equal_pipelines_share_their_exchanges() -> None:
    outline = model(3, tied=False)
    placement = place(outline, Strategy.parse("4*<tp1,pp1>w", layers=3), [2] * 4)
    found = turns(placement, "train")
    assert all(len(turn.stages) == 4 for turn in found)
    # Of five blocks, the head's forward and backward share a pull, and so do the embedding's backward and next forward.
    assert sum(turn.op is Op.PULL for turn in found) == 2 * 2 * 5 - 2 - 1
    assert sum(turn.op is Op.PUSH for turn in found) == 2 * 5


def test_at_most_two_blocks_of_weights_and_one_of_gradients_are_alive() -> None:
    (program, *_) = rank_programs(model(6, tied=False), Strategy.parse("2*<tp1,pp1>w", layers=6), [3, 3], ranks=2)
    alive: set[str] = set()
    most = 0
    for instruction in program.instructions:
        alive |= {value for value in instruction.writes if value.kind is ValueKind.WEIGHTS}
        alive -= set(instruction.reads) if instruction.op is Op.FREE else set()
        most = max(most, len(alive))
        if instruction.op is Op.BACKWARD:
            made = [value for value in instruction.writes if value.kind is ValueKind.GRADIENTS]
        if instruction.op is Op.PUSH:
            assert list(instruction.reads) == made  # those of the backward before
    assert most == 2


def test_a_stage_that_streams_gradients_only_pulls_once() -> None:
    (program, *_) = rank_programs(model(3), Strategy.parse("2*<tp1,pp1>g", layers=3), [3, 3], ranks=2)
    pulls = [i.target for i in program.instructions if i.op is Op.PULL]
    assert pulls == [bucket_of(name) for name in dict.fromkeys(pulls)]
    assert sum(i.op is Op.PUSH for i in program.instructions) == 3 * (3 + 2 + 1)  # the tied table twice


STREAMS: list[bool | str] = [False, True, True, "gradients"]


@st.composite
def iterations(draw: st.DrawFn) -> tuple[Outline, Strategy, list[int], int]:
    """Draw a model, a strategy of up to three pipelines that may share a stage, and numbers of micro-batches."""
    layers = draw(st.integers(1, 4))
    outline = model(layers, tied=draw(st.booleans()))
    names = [name for name, _ in outline.buckets]
    frozen = tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=3)))
    sizes = tuple(draw(st.sampled_from([1, 5, 20])) for _ in names)
    outline = replace(outline, frozen=frozen, elements=sizes, window=draw(st.sampled_from([None, 0, 12])))
    pipelines: list[Pipeline] = []
    devices = 0
    for _ in range(draw(st.integers(1, 3))):
        stages: list[Stage] = []
        while (left := layers - sum(stage.layers for stage in stages)) > 0:
            size = draw(st.integers(1, 2))
            streams = draw(st.sampled_from(STREAMS))
            of_stage = tuple(range(devices, devices + size))
            stages.append(Stage(of_stage, draw(st.integers(1, left)), stream=streams))
            devices += size
        pipelines.append(Pipeline(draw(returning(stages))))
    first = pipelines[0].stages
    if len(pipelines) > 1 and len(first) > 1 and not pipelines[0].interleaved and draw(st.booleans()):
        own = Stage(pipelines[1].stages[0].devices, layers - first[-1].layers, stream=draw(st.booleans()))
        pipelines[1] = Pipeline((own, first[-1]))
    strategy = Strategy(tuple(pipelines), draw(st.sampled_from(["1f1b", "gpipe"])))
    return outline, strategy, [draw(st.integers(0, 3)) for _ in pipelines], devices + draw(st.integers(0, 1))


@given(iterations(), st.sampled_from(["train", "evaluate"]))
def test_drawn_programs_are_proven(drawn: tuple[Outline, Strategy, list[int], int], mode: Mode) -> None:
    outline, strategy, counts, ranks = drawn
    programs = rank_programs(outline, strategy, counts, mode, ranks=ranks)
    verify(programs, outline, mode)
    assert tuple(shared_programs(outline, strategy, counts, mode, ranks=ranks)) == programs
    assert all(parse(to_text(program)) == program for program in programs)


def _broken(program: RankProgram, op: Op, how: str) -> RankProgram:
    """Return a program whose middle pull or push is missing, repeated, late, or of another exchange."""
    found = list(program.instructions)
    places = [i for i, instruction in enumerate(found) if instruction.op is op and instruction.target != "none"]
    at = places[len(places) // 2]
    instruction = found.pop(at)
    if how == "repeated":
        found[at:at] = [instruction, instruction]
    elif how == "late":
        found.insert(places[len(places) // 2 + 1], instruction)
    elif how == "of another":
        other = replace(instruction, target=found[places[0]].target, reads=(), writes=(), after=())
        found.insert(at, other)
    return replace(program, instructions=tuple(found))


@pytest.mark.parametrize("how", ["missing", "repeated", "late", "of another"])
@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH])
@settings(max_examples=5)
@given(rank=st.integers(0, 2))
def test_a_broken_order_is_rejected(op: Op, how: str, rank: int) -> None:
    outline = model(2)
    programs = list(rank_programs(outline, Strategy.parse("<[0]x1w,[1]x1w> + <[2]x2w>", layers=2), [2, 3], ranks=3))
    programs[rank] = _broken(programs[rank], op, how)
    with pytest.raises(VerificationError):
        verify(programs, outline)


def test_gradients_that_are_not_pushed_are_rejected() -> None:
    outline = model(2)
    programs = list(rank_programs(outline, Strategy.parse("2*<tp1,pp1>w", layers=2), [2, 2], ranks=2))
    instructions = [_without_reads(i) for i in programs[0].instructions]
    programs[0] = replace(programs[0], instructions=tuple(instructions))
    with pytest.raises(VerificationError, match=r"this rank needs layer\.1@0"):
        verify(programs, outline)


def _without_reads(instruction: Instruction) -> Instruction:
    if (instruction.op, instruction.target) != (Op.PUSH, "layer.1@0"):
        return instruction
    kept = tuple(value for value in instruction.after if value not in instruction.reads)
    return replace(instruction, reads=(), after=kept)

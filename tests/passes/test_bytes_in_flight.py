"""Room for pulls and pushes: who waits for what, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.value import gradients, weights
from hydragraph.passes.bytes_in_flight import windowed
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import iterations, model, shared

NAMES = ("embed", "layer.0", "layer.1", "layer.2", "head")
UNEQUAL = Outline(NAMES, tuple((name, (name,)) for name in NAMES), elements=(8, 2, 3, 2, 9))


def waits(outline: Outline) -> list[str]:
    pulls = [Instruction(Op.PULL, name, writes=(weights(name),)) for name in NAMES]
    return [" ".join(value.bucket for value in pull.after) for pull in windowed(pulls, outline)]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, ["", "", "", "", "embed"]),  # two of the largest block: 18
        (10, ["", "", "embed", "", "layer.0 layer.1 layer.2"]),
        (0, ["", "embed", "layer.0", "layer.1", "layer.2"]),  # one at a time
        (100, ["", "", "", "", ""]),
    ],
)
def test_an_exchange_waits_for_as_many_of_the_oldest_as_there_must_be(window: int | None, expected: list[str]) -> None:
    assert waits(replace(UNEQUAL, window=window)) == expected


def word(instruction: Instruction) -> str:
    exchanged = instruction.op in (Op.PULL, Op.PUSH)
    after = "".join(f"|{v}" for v in instruction.after if exchanged and v not in instruction.reads)
    return f"{instruction.op.value} {instruction.target}{after}"


def test_the_first_stage_computes_between_pulls_and_pushes_and_later_stages_wait_at_their_ends() -> None:
    outline = replace(model(2, tied=False), window=1)
    first, second = rank_programs(outline, Strategy.parse("<tp1,pp2>", 2), [1], ranks=2)
    ops = (Op.PULL, Op.PUSH, Op.FORWARD, Op.BACKWARD, Op.SEND, Op.RECEIVE)
    assert [word(i) for i in first.instructions if i.op in ops and i.target != "aux"] == [
        "pull embed",
        "pull layer.0|W.embed",
        "forward embed",
        "pull layer.1|W.layer.0",
        "forward layer.0",
        "send ",
        "pull head|W.layer.1",
        "receive ",
        "push head",
        "push layer.1|G.head",
        "backward layer.0",
        "push layer.0|G.layer.1",
        "backward embed",
        "push embed|G.layer.0",
    ]
    assert [word(i) for i in second.instructions if i.op in (Op.PULL, Op.PUSH, Op.SEND, Op.RECEIVE)] == [
        "pull embed",
        "pull layer.0|W.embed",
        "pull layer.1|W.layer.0",
        "pull head|W.layer.1",
        "receive ",
        "push head",
        "send ",
        "push layer.1|G.head",
        "push layer.0|G.layer.1",
        "push embed|G.layer.0",
    ]


@given(st.one_of(iterations(), shared()))
def test_no_rank_has_more_in_flight_than_the_window_or_one_bucket(
    iteration: tuple[Outline, Strategy, list[int], Mode, int],
) -> None:
    outline, strategy, counts, mode, ranks = iteration
    largest = max(sum(outline.sizes[name] for name in names) for names in outline.weights.values())
    room = 2 * largest if outline.window is None else outline.window
    for program in rank_programs(outline, strategy, counts, mode, ranks=ranks):
        for op, named in ((Op.PULL, weights), (Op.PUSH, gradients)):
            under_way: set[str] = set()
            for instruction in program.instructions:
                if instruction.op is op:
                    under_way -= {value.bucket for value in instruction.after if value != named(instruction.target)}
                    under_way.add(instruction.target)
                    total = sum(outline.sizes[name] for name in under_way)
                    assert total <= room or len(under_way) == 1

"""The texts of programs that ranks share: golden ones, and every rank's full text comes back from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import to_text
from hydragraph.ir.shared_programs_text import program_texts, read_programs, runs_text
from hydragraph.passes.pipeline import rank_programs, shared_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import iterations, model, shared
from tests.thorough import thorough

STRATEGY = Strategy.parse("<[0,1]x1,[2]x1> + <[3,4]x1,[5]x1>", 2)


def texts() -> dict[str, str]:
    return program_texts(shared_programs(model(2), STRATEGY, [1, 1], ranks=7))


@thorough
@settings(max_examples=60)
@given(st.one_of(iterations(), shared()))
def test_every_rank_has_its_full_text(iteration: tuple[Outline, Strategy, list[int], Mode, int]) -> None:
    outline, strategy, counts, mode, ranks = iteration
    made = program_texts(shared_programs(outline, strategy, counts, mode, ranks=ranks))
    read = read_programs(made)
    for rank, program in enumerate(rank_programs(outline, strategy, counts, mode, ranks=ranks)):
        assert read[rank] == program
        assert to_text(read[rank]) == to_text(program)
    assert program_texts(read) == made


def test_golden_table() -> None:
    assert texts()["ranks.txt"].partition("full program.\n")[2] == (
        "rank  kind  P  T    peers\n"
        "0     0     0  0-1  2\n"
        "1     1     0  0-1  2\n"
        "2     2     0  2    0,1\n"
        "3     0     1  3-4  5\n"
        "4     1     1  3-4  5\n"
        "5     2     1  5    3,4\n"
        "6     3     -  -    -\n"
    )


def test_golden_kind() -> None:
    lines = texts()["program_2.txt"].splitlines()
    assert lines[:2] == [
        "# Kind 2, which 2 ranks run: 2,5. See ranks.txt.",
        f"rank R of 7  strategy {STRATEGY}  pipeline P, stage 1: layers 1-1, tp 1 (ranks T), micro-batches 1",
    ]
    sends = [line.split(" after ")[0].rstrip() for line in lines if line.startswith("p2p")]
    assert sends == [
        "p2p      h1.0 = receive <- rank A",
        "p2p      send d1.0 -> rank A",
        "p2p      send d1.0 -> rank B",
    ]
    assert any(line.startswith("compute  free d1.0>A, d1.0>B") for line in lines)


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("ranks.txt", "2     2     0  2    0,1", "2     2     0  2    0", "rank 2: its peers are [0]"),
        ("ranks.txt", "1     1     0  0-1  2\n", "", "line 10: expected rank 1, its kind, P, T and peers, found '2"),
        ("ranks.txt", "3-4  5\n4", "3-x  5\n4", "line 12: expected numbers such as 0-7,12, or - for none, found '3-x'"),
        ("ranks.txt", "0     0     0  0-1", "0     0     0  0-2", "found 1 pipelines and 3 ranks"),
        ("ranks.txt", "6     3     -", "6     9     -", "program_4.txt is missing"),
        ("program_0.txt", "send h1.0 -> rank A", "send h1.0 to A", "program_0.txt: line"),
    ],
)
def test_what_does_not_fit_is_named(name: str, old: str, new: str, sentence: str) -> None:
    made = texts()
    assert old in made[name]
    with pytest.raises(ValueError, match=r".") as caught:
        read_programs({**made, name: made[name].replace(old, new, 1)})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "text"), [((), "-"), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((2, 1, 0), "2,1,0"), ((1, 2, 2), "1-2,2")]
)
def test_runs(numbers: tuple[int, ...], text: str) -> None:
    assert runs_text(numbers) == text

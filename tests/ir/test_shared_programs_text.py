"""The texts of programs that ranks share."""

from __future__ import annotations

import pytest

from hydragraph.ir.shared_programs_text import program_texts, runs_text
from hydragraph.passes.pipeline import shared_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import model

STRATEGY = Strategy.parse("<[0,1]x1,[2]x1> + <[3,4]x1,[5]x1>", 2)


def texts() -> dict[str, str]:
    return program_texts(shared_programs(model(2), STRATEGY, [1, 1], ranks=7))


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
    ("numbers", "text"), [((), "-"), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((2, 1, 0), "2,1,0"), ((1, 2, 2), "1-2,2")]
)
def test_runs(numbers: tuple[int, ...], text: str) -> None:
    assert runs_text(numbers) == text

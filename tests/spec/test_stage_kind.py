"""Kinds of stages and parts of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.spec.stage_kind import StageKind, StagePart

budgets = st.integers(1, 99).map(lambda hundredths: hundredths / 100)
kinds = st.builds(StageKind, st.integers(1, 64), st.booleans(), st.booleans() | budgets, st.booleans())


@given(kinds)
def test_a_name_gives_the_kind_back(kind: StageKind) -> None:
    assert StageKind.parse(kind.text) == kind


@given(kinds)
def test_a_kind_has_a_part_for_each_of_its_ranks(kind: StageKind) -> None:
    parts = kind.parts()
    assert [part.index for part in parts] == list(range(kind.tp))
    assert all((part.tp, part.sequence_parallel, part.recompute) == kind[:3] for part in parts)


def test_names() -> None:
    assert StageKind(2, sequence_parallel=True, recompute=True).text == "tp2sr"
    assert str(StagePart(StageKind(2, True), 1)) == "tp2s:1"
    assert StageKind(2, True, 0.5).text == "tp2sr0.5"
    assert StageKind(2, True, 0.5).marks == ("sequence parallel", "recomputed within a memory budget of 0.5")
    assert StageKind(2, False, True).marks == ("recomputed",)
    assert StageKind(2, False, 0.5, True).text == "tp2r0.5p"
    assert StageKind(2, sums_in_pieces=True).marks == ("sums in pieces",)


@pytest.mark.parametrize(
    "text", ["", "2", "tp", "tp0", "tp2rs", "tp2x", "tp-1", "tp2r1", "tp2r0.0", "tp20.5", "tp2r0.125", "tp2pr"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a kind of stage: write tp2"):
        StageKind.parse(text)

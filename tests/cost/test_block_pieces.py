"""Constants of pieces that failed, and the names of kinds of stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.block_pieces import Constants
from hydragraph.spec.stage_kind import StageKind


@given(st.builds(StageKind, st.integers(1, 99), st.booleans(), st.booleans()))
def test_a_kinds_text_is_read_back(kind: StageKind) -> None:
    assert StageKind.parse(kind.text) == kind


@pytest.mark.parametrize(
    ("constants", "failed"),
    [((1, 1, 0), False), ((0, 1, 0), True), ((1, 0, 0), True), ((1, 1, -1), True), ((-1, 1, 1), True)],
)
def test_a_fit_without_attention_or_work_has_failed(constants: tuple[float, float, float], failed: bool) -> None:
    assert Constants(*constants).failed == failed

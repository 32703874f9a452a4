"""Stages as sums of pieces: their seconds, what they hold, and the names of their kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.pieces import FROZEN_BYTES, GRADIENT_BYTES, HOME_BYTES, Constants, Piece, PricedDevice, PricedStage
from hydragraph.spec.stage_kind import StageKind

DEVICE = PricedDevice("toy", 1e6, 1000, 2)
PIECES = (Piece(Constants(1e-9, 2e-6, 3e-4), 100, 8.0, 5.0, 40.0), Piece(Constants(0.0, 1e-6, 1e-4), 50, 4.0, 9.0))


@given(st.builds(StageKind, st.integers(1, 99), st.booleans(), st.booleans()))
def test_a_kinds_text_is_read_back(kind: StageKind) -> None:
    assert StageKind.parse(kind.text) == kind


@pytest.mark.parametrize(
    ("constants", "failed"),
    [((1, 1, 0), False), ((0, 1, 0), True), ((1, 0, 0), True), ((1, 1, -1), True), ((-1, 1, 1), True)],
)
def test_a_fit_without_attention_or_work_has_failed(constants: tuple[float, float, float], failed: bool) -> None:
    assert Constants(*constants).failed == failed


def test_a_stages_seconds_are_the_sum_of_its_pieces() -> None:
    found = PricedStage(StageKind(1), PIECES, 1).seconds
    assert (found.a, found.b, found.c) == pytest.approx((1e-9, 3e-6, 4e-4))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tokens_fill_a_device_and_one_more_would_not_fit(in_flight: int, devices: int, itemsize: int) -> None:
    device = replace(DEVICE, itemsize=itemsize)
    tokens = PricedStage(StageKind(1), PIECES, in_flight).max_len(device, devices)

    def held(tokens: int) -> float:
        state = HOME_BYTES * 1000 / devices + 40.0 + tokens * (in_flight * 12.0 + 9.0)
        weights = 0 if devices == 1 and itemsize == 4 else 150 * itemsize  # fp32 weights are used where they are kept
        return state + weights + (150 * GRADIENT_BYTES if devices > 1 else 0)

    assert held(tokens) <= DEVICE.memory < held(tokens + 1)


def test_what_is_frozen_has_no_gradient_and_no_moments() -> None:
    device = replace(DEVICE, frozen=400)
    pieces = (replace(PIECES[0], frozen=100), PIECES[1])
    more = (HOME_BYTES - FROZEN_BYTES) * 400 / 4 + 100 * GRADIENT_BYTES
    found, wanted = PricedStage(StageKind(1), pieces, 1), PricedStage(StageKind(1), PIECES, 1)
    assert found.max_len(device, 4) == wanted.max_len(replace(DEVICE, memory=DEVICE.memory + more), 4)


def test_no_token_fits_beside_a_state_that_is_too_large() -> None:
    assert PricedStage(StageKind(1), PIECES, 1).max_len(replace(DEVICE, elements=10**6), 1) == 0
    assert PricedStage(StageKind(1), (Piece(Constants(0, 1, 0)),), 1).max_len(DEVICE, 1) == 0

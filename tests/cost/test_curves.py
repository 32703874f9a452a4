"""Curves: constants against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hydragraph.cost.curves import Constants
from hydragraph.cost.reach import AttentionReach

CONSTANTS = Constants(1e-9, 2e-6, 3e-4)


def test_constants_by_hand() -> None:
    assert CONSTANTS.seconds([1000, 2000]) == pytest.approx(5e-3 + 6e-3 + 3e-4)
    assert CONSTANTS.times(2).seconds([1000]) == pytest.approx(2 * CONSTANTS.seconds([1000]))


WINDOWED = Constants(1e-9, 2e-6, 3e-4, ((AttentionReach(window=10), 1e-6), (AttentionReach(chunk=8), 2e-6)))


def test_constants_with_windows_and_chunks_by_hand() -> None:
    near = 1e-6 * (2 * 10 * 20 - 100) + 2e-6 * (2 * 64 + 16)
    assert WINDOWED.seconds([20]) == pytest.approx(1e-9 * 400 + 2e-6 * 20 + 3e-4 + near)
    assert WINDOWED.work(20) == pytest.approx(WINDOWED.seconds([20]) - 3e-4)
    assert WINDOWED.work(np.array([20.0, 7.0])).tolist() == pytest.approx([WINDOWED.work(20), WINDOWED.work(7)])
    assert WINDOWED.times(3).seconds([20, 7]) == pytest.approx(3 * WINDOWED.seconds([20, 7]))
    both = Constants.sum([(2, WINDOWED), (1, CONSTANTS)])
    assert both.seconds([20, 7]) == pytest.approx(2 * WINDOWED.seconds([20, 7]) + CONSTANTS.seconds([20, 7]))

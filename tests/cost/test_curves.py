"""Curves: constants against sums by hand, tables at and between what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.curves import Constants, Table, curve_record, read_curve
from hydragraph.cost.reach import Reach
from hydragraph.errors import Unsupported

CONSTANTS = Constants(1e-9, 2e-6, 3e-4)


def table(*micro_batches: tuple[int, ...]) -> Table:
    return Table(tuple((len(m), sum(m), CONSTANTS.seconds(m)) for m in micro_batches))


def test_constants_by_hand() -> None:
    assert CONSTANTS.seconds([1000, 2000]) == pytest.approx(5e-3 + 6e-3 + 3e-4)
    assert CONSTANTS.times(2).seconds([1000]) == pytest.approx(2 * CONSTANTS.seconds([1000]))


WINDOWED = Constants(1e-9, 2e-6, 3e-4, ((Reach(window=10), 1e-6), (Reach(chunk=8), 2e-6)))


def test_constants_with_windows_and_chunks_by_hand() -> None:
    near = 1e-6 * (2 * 10 * 20 - 100) + 2e-6 * (2 * 64 + 16)
    assert WINDOWED.seconds([20]) == pytest.approx(1e-9 * 400 + 2e-6 * 20 + 3e-4 + near)
    assert WINDOWED.work(20) == pytest.approx(WINDOWED.seconds([20]) - 3e-4)
    assert WINDOWED.work(np.array([20.0, 7.0])).tolist() == pytest.approx([WINDOWED.work(20), WINDOWED.work(7)])
    assert WINDOWED.times(3).seconds([20, 7]) == pytest.approx(3 * WINDOWED.seconds([20, 7]))
    both = Constants.sum([(2, WINDOWED), (1, CONSTANTS)])
    assert both.seconds([20, 7]) == pytest.approx(2 * WINDOWED.seconds([20, 7]) + CONSTANTS.seconds([20, 7]))


def test_curves_survive_as_json_and_older_constants_are_read() -> None:
    for curve in (CONSTANTS, WINDOWED):
        assert read_curve(json.loads(json.dumps(curve_record(curve)))) == curve
    assert curve_record(CONSTANTS) == {"a": 1e-9, "b": 2e-6, "c": 3e-4}


ROWS = [(n,) for n in (256, 1024, 4096)] + [(n // 4,) * 4 for n in (256, 1024, 4096)]


@pytest.mark.parametrize("row", ROWS)
def test_what_was_measured_is_read_back(row: tuple[int, ...]) -> None:
    assert table(*ROWS).seconds(row) == pytest.approx(CONSTANTS.seconds(row))


@given(st.lists(st.integers(128, 900), min_size=1, max_size=6))
def test_what_lies_between_is_near(lengths: list[int]) -> None:
    many = table(*((n,) * k for n in range(128, 1025, 128) for k in (1, 2, 4, 8)))
    assert many.seconds(lengths) == pytest.approx(CONSTANTS.seconds(lengths), rel=0.03)


def test_micro_batches_of_one_length_are_joined_by_lines() -> None:
    found = Table(((1, 2048, 1.0), (2, 4096, 1.5), (8, 16384, 4.5)))
    assert found.seconds([2048] * 4) == pytest.approx(2.5)
    assert found.seconds([2048] * 16) == pytest.approx(8.5)  # twice the largest
    assert found.seconds([1024]) == pytest.approx(0.75)
    assert found.seconds([]) == 0
    with pytest.raises(Unsupported, match="34816 tokens, but at most 16384 were measured"):
        found.seconds([2048] * 17)


def test_search_gets_constants_near_a_table() -> None:
    exact = table(*ROWS).constants()
    assert (exact.a, exact.b, exact.c) == pytest.approx((CONSTANTS.a, CONSTANTS.b, CONSTANTS.c))
    flat = Table(((1, 100, 2.0), (2, 200, 3.0))).constants()
    assert (flat.a, flat.b, flat.c) == pytest.approx((0.0, 0.01, 1.0))


@pytest.mark.parametrize("rows", [(), ((1, 10, 1.0), (1, 10, 2.0)), ((0, 10, 1.0),), ((1, 10, -1.0),)])
def test_what_is_no_table_is_refused(rows: tuple[tuple[int, int, float], ...]) -> None:
    with pytest.raises(ValueError, match="the table"):
        Table(rows)


@pytest.mark.parametrize("curve", [CONSTANTS, Table(((1, 10, 1.0), (2, 20, 1.5)))])
def test_curves_are_read_back(curve: Constants | Table) -> None:
    assert read_curve(curve_record(curve)) == curve

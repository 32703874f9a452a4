"""Charts: round numbers at their axes, and every point inside them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.report.charts import HEIGHT, MOST_MARKS, WIDTH, Series, line_chart, memory_chart, ticks


def test_ticks_are_round() -> None:
    assert ticks(0, 8.7) == [0, 2, 4, 6, 8]
    assert ticks(0.11, 0.34) == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert ticks(3, 3) == [3]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_within_and_evenly_apart(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in found)
    steps = {round((b - a) / width, 6) for a, b in pairwise(found)}
    assert len(steps) == 1


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_every_point_is_inside(ys: list[float]) -> None:
    series = Series("loss", tuple(enumerate(ys, 1)), "s-0", marks=True)
    made = line_chart("a chart", [series], "loss", str)
    places = re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', made)
    assert len(places) == len(ys)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in places)


def test_many_points_get_fewer_marks_and_what_is_not_finite_none() -> None:
    series = Series("loss", tuple((i, 1.0 if i % 7 else float("nan")) for i in range(10_000)), "s-0", marks=True)
    made = line_chart("a chart", [series], "loss", str)
    assert 0 < made.count("<circle") <= MOST_MARKS
    assert "nan" not in made


def test_a_limit_is_drawn_where_it_is_near() -> None:
    points = ((0.0, 1.0), (0.5, 3.0))
    assert "limit" in memory_chart(points, 1.0, 4.0, 3.0, "rank 0", str)
    assert "limit" not in memory_chart(points, 1.0, 400.0, 3.0, "rank 0", str)

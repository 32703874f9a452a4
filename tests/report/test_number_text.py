"""Numbers as tables write them."""

from __future__ import annotations

import pytest

from hydragraph.report.number_text import bytes_text, counts_text, seconds_text


@pytest.mark.parametrize(
    ("counts", "text"),
    [([], ""), ([4], "4"), ([4, 2], "4,2"), ([16, 16], "16,16"), ([16] * 8, "8*16"), ([1, 5, 5, 5, 1], "1,3*5,1")],
)
def test_equal_neighbours_stand_together_from_three_on(counts: list[int], text: str) -> None:
    assert counts_text(counts) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0"), (1.5e-6, "1.5 us"), (0.00123, "1.23 ms"), (1, "1 s"), (123.4, "123 s")]
)
def test_times_have_a_unit_that_suits_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (12, "12 B"), (1500, "1.5 kB"), (1.35e9, "1.35 GB"), (2e12, "2 TB")]
)
def test_bytes_have_a_unit_that_suits_them(count: float, text: str) -> None:
    assert bytes_text(count) == text

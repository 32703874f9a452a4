"""Numbers as a report writes them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.report import number_format
from hydragraph.report.number_text import counts_text

SCALE = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (0.9999, "1.00 s"), (90.0, "1.50 min"), (-2e-6, "−2.00 µs")],
)
def test_seconds(value: float, text: str) -> None:
    assert number_format.seconds(value) == text


@given(st.floats(1e-9, 1e6))
def test_seconds_are_right_to_three_digits(value: float) -> None:
    number, unit = number_format.seconds(value).split()
    assert float(number.replace(",", "")) * SCALE[unit] == pytest.approx(value, rel=6e-3)
    assert len(re.sub(r"[.,]", "", number)) <= 4 or value > 3600


def test_what_is_not_known_is_a_dash() -> None:
    assert (
        number_format.seconds(None)
        == number_format.seconds(float("inf"))
        == number_format.rate(None)
        == number_format.times(1, 0)
        == "–"
    )


def test_bytes_rates_and_shares() -> None:
    assert [number_format.size(n) for n in (0, 999, 1e9, 141e9)] == ["0 B", "999 B", "1.00 GB", "141 GB"]
    assert [number_format.rate(n) for n in (8210, 3.456e6)] == ["8,210", "3.46 M"]
    assert [number_format.share(x) for x in (0, 1e-5, 0.0123, 0.5, 1.07)] == ["0%", "<0.1%", "1.2%", "50%", "107%"]
    assert number_format.times(3, 2) == "1.50 ×"


def test_ranks_as_ranges() -> None:
    assert number_format.ranks_text([3]) == "3"
    assert number_format.ranks_text([9, 0, 1, 2, 8]) == "0–2, 8–9"
    assert number_format.ranks_text(range(0, 40, 2), most=2) == "0, 2 and 18 more"
    assert counts_text([8] * 16 + [4, 4], " × ", ", ") == "16 × 8, 4, 4"


@given(st.lists(st.integers(0, 60), min_size=1, unique=True))
def test_no_rank_is_lost(ranks: list[int]) -> None:
    found: set[int] = set()
    for part in number_format.ranks_text(ranks, most=99).split(", "):
        first, _, last = part.partition("–")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == set(ranks)

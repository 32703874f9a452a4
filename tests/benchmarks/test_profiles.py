"""Equation 5 of AutoHet: exact where layers add up, and for the numbers of layers that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from benchmarks.profiles import Powers, powers_to


def test_the_example_of_powers() -> None:
    powers = Powers((1.1, 2.0, 3.9))
    assert powers.seconds(5) == pytest.approx(5.0)
    assert powers.seconds(7) == pytest.approx(7.0)


@given(st.integers(1, 200), st.floats(0.01, 10.0))
def test_layers_that_add_up_are_priced_exactly(layers: int, each: float) -> None:
    counts = powers_to(layers)
    assert counts[-1] <= layers < 2 * counts[-1]
    assert Powers(tuple(each * n for n in counts)).seconds(layers) == pytest.approx(each * layers)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6))
def test_what_was_measured_is_what_it_says(measured: list[float]) -> None:
    assert [Powers(tuple(measured)).seconds(1 << i) for i in range(len(measured))] == measured


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(hg.Unsupported, match=r"a stage of 9 layers.*\(1, 2, 4, 8\)"):
        Powers((1.0, 2.0, 4.0)).seconds(9)

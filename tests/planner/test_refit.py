"""Strategies for the ranks that are left: of the shape of one that fitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.errors import Unsupported
from hydragraph.planner.refit import Fits, refit
from hydragraph.spec.strategy import Strategy


def fits(ranks: int, layers: int, heads: int = 8) -> Fits:
    def check(strategy: Strategy) -> bool:
        try:
            strategy.check(layers, ranks, (heads,))
        except ValueError:
            return False
        return True

    return check


def refitted(text: str, ranks: int, layers: int = 8, heads: int = 8) -> str:
    (found,) = refit([Strategy.parse(text, layers)], ranks, layers, fits(ranks, layers, heads))
    return str(found).partition("@")[0]


def test_what_was_given_stays_where_it_fits() -> None:
    two = [Strategy.parse(text, 8) for text in ("<tp2,pp2>", "<tp1,pp2>")]
    assert refit(two, 3, 8, fits(3, 8)) == (two[1],)


@pytest.mark.parametrize(
    ("text", "ranks", "wanted"),
    [
        ("4*<tp1,pp2>", 7, "<tp1,pp3> + 2*<tp1,pp2>"),
        ("2*<tp2,pp2>", 7, "<tp2,pp3>"),
        ("2*<tp2,pp1>", 3, "<tp2,pp1>"),
        ("<tp4,pp1>", 3, "<tp1,pp3>"),
        ("2*<tp1,pp1>", 1, "<tp1,pp1>"),
        ("4*<tp1,pp1>rw", 3, "3*<tp1,pp1>rw"),
    ],
)
def test_shapes_stay(text: str, ranks: int, wanted: str) -> None:
    assert refitted(text, ranks) == wanted


@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from(["<tp1,pp1>", "<tp2,pp1>", "2*<tp1,pp1>"]))
def test_something_always_fits(ranks: int, layers: int, text: str) -> None:
    (found, *_) = refit([Strategy.parse(text, layers)], ranks, layers, fits(ranks, layers))
    found.check(layers, ranks, (8,))


def test_nothing_fits() -> None:
    with pytest.raises(Unsupported, match="2 ranks: no strategy like"):
        refit([Strategy.parse("<tp1,pp4>", 4)], 2, 4, lambda _: False)

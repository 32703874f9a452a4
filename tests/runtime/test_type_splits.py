"""Types that blocks' times divide, from made-up times."""

from __future__ import annotations

import math

import pytest

from hydragraph.runtime.type_splits import split_types


@pytest.mark.parametrize(
    ("nodes", "seconds", "error", "expected"),
    [
        ("ab", (1.0, 1.04), 0.001, "g g"),
        ("ab", (1.0, 1.25), 0.001, "g g-80"),
        ("ab", (1.25, 1.0), 0.001, "g-80 g"),
        ("ab", (1.0, 1.25), 0.1, "g g"),  # noise
        ("ab", (1.0, 1.25), math.inf, "g g"),
        ("aaab", (1.0, 1.03, 1.2, 1.01), 0.001, "g g g g"),  # one node keeps one type unless its devices differ much
        ("aaab", (1.0, 1.03, 2.0, 1.01), 0.001, "g g g-50.5 g"),
        ("aabb", (1.0, 1.1, 1.2, 1.3), 0.001, "g g g-84 g-84"),
        ("abcd", (1.0, 1.04, 1.08, 1.2), 0.001, "g g g-94.4 g-85"),
    ],
)
def test_ranks_of_one_type_are_divided_by_their_times(
    nodes: str, seconds: tuple[float, ...], error: float, expected: str
) -> None:
    errors = [error] * len(nodes)
    assert " ".join(split_types(nodes, ["g"] * len(nodes), seconds, errors)) == expected


def test_types_stay_apart_and_have_names_of_their_own() -> None:
    types = ("g", "g", "v", "g-80", "v")
    found = split_types("abcde", types, (1.0, 1.25, 1.0, 1.25, 1.0), [0.001] * 5)
    assert found == ("g", "g-80-slow", "v", "g-80", "v")

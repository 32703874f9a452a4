"""Owners in words."""

from __future__ import annotations

import pytest

from hydragraph.spec.home import Home
from hydragraph.spec.home_text import owners_text

NAMES = ["embed", "layer.0", "layer.0/frozen", "layer.1", "layer.2", "head"]
FIRST = {"embed": [1, 1, 0], "layer.0": [1, 1, 0], "layer.0/frozen": [1, 1, 0], "layer.1": [1, 1, 0]}


@pytest.mark.parametrize(
    ("home", "text"),
    [
        (Home(), "all on ranks 0-2"),
        (Home([0, 1, 0]), "all on rank 1"),
        (Home([3, 1, 0], 2), "all twice on ranks 0,1 (3:1)"),
        (Home([0, 0, 1], buckets=FIRST), "embed, layers 0-1 on ranks 0,1; layer 2, head on rank 2"),
        (Home(buckets={"head": [1, 0, 1]}), "embed, layers 0-2 on ranks 0-2; head on ranks 0,2"),
        (Home(rule="auto"), "chosen for the strategies (auto)"),
    ],
)
def test_neighbours_with_equal_owners_stand_together(home: Home, text: str) -> None:
    assert owners_text(home, NAMES, 3) == text

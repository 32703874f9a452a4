from __future__ import annotations

import pytest

from hydragraph.planner.metis.divisions import divisions
from tests.planner.metis import literal


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 12, 16])
def test_every_division_once(ranks: int) -> None:
    for stages in range(1, min(ranks, 7) + 1):
        found = [tuple(row) for rows in divisions(ranks, stages) for row in rows.tolist()]
        assert sorted(found) == sorted(literal.divisions(ranks, stages))


def test_the_example_of_the_function() -> None:
    rows = [row for chunk in divisions(32, 7) for row in chunk.tolist()]
    assert len(rows) == 7
    assert all(sorted(row) == [4] * 6 + [8] for row in rows)


def test_many_come_in_chunks() -> None:
    chunks = list(divisions(48, 20))
    assert sum(len(chunk) for chunk in chunks) > 4096
    assert all(len(chunk) <= 4096 and (chunk.sum(axis=1) == 48).all() for chunk in chunks)

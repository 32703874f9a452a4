"""Health: rates of ranks, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import hydragraph as hg


def test_ranks_without_a_rate_are_healthy() -> None:
    health = hg.Health({3: 2.57, 5: math.inf, 1: 1})
    assert [health.rate(rank) for rank in (0, 1, 3, 5)] == [1, 1, 2.57, math.inf]
    assert health.lost == (5,)
    assert health == hg.Health({5: math.inf, 3: 2.57})
    assert health.with_rate(3, 1.0) == hg.Health({5: math.inf})
    assert hash(health) == hash(hg.Health({5: math.inf, 3: 2.57}))


@pytest.mark.parametrize("rates", [{0: 0.5}, {0: math.nan}, {-1: 2}, {"a": 2}, {0: True}])
def test_what_is_no_rate_is_refused(rates: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="rates"):
        hg.Health(rates)


def test_a_file_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "health.yaml"
    file.write_text("3: 2.57\n5: .inf\n")
    assert hg.Health.load(file) == hg.Health({3: 2.57, 5: math.inf})
    for text, message in (
        ("- 3", "give one line per rank"),
        ("3: 0.5", "rank 3 has 0.5"),
        ("three: 2", "rank 'three'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"health.yaml: .*{message}"):
            hg.Health.load(file)

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
    assert hash(health) == hash(hg.Health({5: math.inf, 3: 2.57}))


@pytest.mark.parametrize("rates", [{0: 0.5}, {0: math.nan}, {-1: 2}, {"a": 2}, {0: True}])
def test_what_is_no_rate_is_refused(rates: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="rates"):
        hg.Health(rates)


def test_a_file_names_the_ranks_that_are_not_healthy(tmp_path: Path) -> None:
    file = tmp_path / "health.yaml"
    file.write_text("{3: 2.57, 5: inf, 6: .inf, 7: 1}")
    assert hg.Health.load(file) == hg.Health({3: 2.57, 5: math.inf, 6: math.inf})
    file.write_text("{}")
    assert hg.Health.load(file) == hg.Health()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{3: 0.5}", "health.yaml: rates: rank 3 has 0.5"),
        ("{3: slow}", "health.yaml: rates: rank 3 has 'slow'"),
        ("{fast: 2}", "health.yaml: 'rates' has rank 'fast'"),
        ("", "health.yaml contains None: give rates by rank"),
        ("{3: 2, 3: 4}", "health.yaml: not readable as YAML: .*given twice"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "health.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        hg.Health.load(tmp_path / "health.yaml")


def test_a_saved_file_is_read_again(tmp_path: Path) -> None:
    for health in (hg.Health({3: 2.57, 5: math.inf}), hg.Health()):
        health.save(tmp_path / "health.yaml")
        assert hg.Health.load(tmp_path / "health.yaml") == health

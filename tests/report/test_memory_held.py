"""Memory: the peaks are the simulation's, and a thinned curve keeps its highest points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.report import memory_held
from hydragraph.report.memory_held import held, thinned
from tests.report.made import four, simulated


def test_every_rank_with_its_peak_and_limit() -> None:
    on = four()
    timeline = simulated(on, "<[0]x1,[1,2]x3>", [4]).timeline
    found, note = held(on, timeline)
    assert note == ""
    assert sorted(rank for each in found for rank in each.ranks) == [0, 1, 2, 3]
    for each in found:
        for rank in each.ranks:
            assert each.peak == timeline.memory[rank].peak.total
            assert each.limit == on.memory_of(rank)
        assert sum(size for _, size in each.parts) == each.peak
        assert max(size for _, size in each.points) <= each.peak


def test_of_many_ranks_one_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_held, "MOST_CURVES", 3)
    on = four()
    found, note = held(on, simulated(on, "<tp2,pp2>", [4]).timeline)
    assert sorted(rank for each in found for rank in each.ranks) == [0, 2]
    assert note == "2 of 4 ranks are shown: the first of each stage."


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300), st.integers(1, 40))
def test_thinning_keeps_the_highest(sizes: list[float], most: int) -> None:
    points = [(float(i), size) for i, size in enumerate(sizes)]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 1)
    assert set(kept) <= set(points)
    assert list(kept) == sorted(kept)
    assert max(size for _, size in kept) == max(sizes)

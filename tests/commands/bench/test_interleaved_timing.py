"""Turns, warm-up and repeats; never how long anything takes."""

from __future__ import annotations

import math

import pytest
import torch

from hydragraph.commands.bench import interleaved_timing
from hydragraph.commands.bench.interleaved_timing import alternate, peak_bytes, timed

CPU = torch.device("cpu")


def test_sides_take_turns_and_each_begins_a_round() -> None:
    calls: list[tuple[str, int]] = []
    sides = {name: (lambda turn, name=name: calls.append((name, turn))) for name in "ab"}
    found = alternate(sides, CPU, rounds=2, warm_up=1)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found.keys() == {"a", "b"}


def test_the_median_is_of_the_rounds_after_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 5.0, 1.0, 2.0])
    monkeypatch.setattr(interleaved_timing, "timed", lambda *_: next(seconds))
    assert alternate({"a": lambda turn: None}, CPU, rounds=3, warm_up=1) == {"a": 2.0}


def test_short_sides_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats: list[int] = []

    def fake(side: object, turn: int, device: torch.device, count: int = 1) -> float:
        repeats.append(count)
        return 0.001

    monkeypatch.setattr(interleaved_timing, "timed", fake)
    alternate({"a": lambda turn: None}, CPU, rounds=2, warm_up=1, at_least_s=0.01)
    assert repeats == [1, 10, 10]


def test_one_timing_makes_all_calls() -> None:
    turns: list[int] = []
    assert timed(turns.append, 7, CPU, repeats=3) >= 0
    assert turns == [7, 7, 7]


def test_no_peak_on_the_cpu() -> None:
    assert math.isnan(peak_bytes(lambda: None, CPU))

"""Choosing every step in a real run: a tiny one on two ranks, and what is printed of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import hydragraph as hg
from benchmarks.dynamic import DYNAMIC, HOMOGENEOUS, STATIC, Row, Run, Taken, configured, on_ranks, summary, table
from hydragraph.cost.pieces import Constants
from hydragraph.cost.profile import Profile
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import prepare
from tests.thorough import thorough
from tests.train.plain import settings

# made up: two ranks as one pipeline are quicker where there is one sequence only
PROFILE = Profile(
    "made up",
    {(1, 1): Constants(1e-5, 1e-3, 1e-3), (2, 1): Constants(6e-6, 6e-4, 2e-3)},
    {1: 16, 2: 16},
    limits={(1, 1): 64, (2, 1): 64},
)


@thorough
def test_all_sides_train_alike(tmp_path: Path) -> None:
    config = from_record(TrainConfig, settings(tmp_path))
    every = hg.launch(on_ranks, 2, config, prepare(config), 2, PROFILE)
    run = every[0]
    assert len(run.rows) == 2
    for row in run.rows:
        assert set(row.taken) == {HOMOGENEOUS, STATIC, DYNAMIC}
        assert row.difference <= 1e-5
        assert all(t.seconds > 0 and t.expected_s > 0 for t in row.taken.values())
        assert row.taken[DYNAMIC].expected_s <= row.taken[STATIC].expected_s * (1 + 1e-9)
    assert run.rows[0].taken[STATIC].loss != run.rows[1].taken[STATIC].loss
    assert run.candidates
    assert "strategy" in run.decision


def test_the_summary_is_arithmetic() -> None:
    sides = {HOMOGENEOUS: (4.0, 2.0), STATIC: (3.0, 2.0), DYNAMIC: (1.5, 1.0)}
    taken = {name: Taken(2.0, seconds, expected, "s") for name, (seconds, expected) in sides.items()}
    run = Run(PROFILE, ("s",), "it stays", (Row((5, 9), taken),) * 3)
    lines = summary(run)
    assert "dynamic / homogeneous (s): 0.375 measured, 0.500 predicted, all steps" in lines
    assert "dynamic / static (s): 0.500 measured, 0.500 predicted, all steps" in lines
    assert "static: measured / predicted 1.50 in the median (1.50 to 1.50)" in lines
    console = Console(width=170, file=io.StringIO(), record=True)
    console.print(table(run))
    assert "3.000 / 2.000" in console.export_text()
    wrong = Row((5,), {**taken, STATIC: Taken(2.2, 1.0, 1.0, "s")})
    assert wrong.difference == pytest.approx(0.1)


def test_the_run_is_the_demos_with_longer_sequences() -> None:
    config = configured(1024, 2048)
    assert (config.data.max_length, config.data.tokens_per_step, config.ranks) == (1024, 2048, 4)
    assert config.model.config is not None
    assert config.model.config["max_position_embeddings"] == 1024

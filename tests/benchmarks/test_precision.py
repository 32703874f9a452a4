"""The comparison of bf16 with fp32: both sides start alike, and what is compared are means over steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.precision import DEVICE_SIZES, Curve, Sizes, configured, differences, smoothed, table, train_both
from hydragraph.spec.record import from_record, load_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import open_tokens, prepare
from tests.thorough import thorough
from tests.train.plain import settings


@thorough
def test_three_steps_of_both_sides(tmp_path: Path) -> None:
    config = from_record(TrainConfig, {**settings(tmp_path), "steps": 3, "strategies": ["<tp1,pp1>"], "ranks": 1})
    told: list[int] = []
    plain, rounded = train_both(config, open_tokens(config, prepare(config)), told.append)
    assert told == [1, 2, 3]
    assert len(plain.losses) == len(rounded.losses) == 3
    assert all(a != b for a, b in zip(plain.losses, rounded.losses, strict=True)), (
        "both sides compute in the same dtype"
    )
    assert plain.losses == pytest.approx(rounded.losses, rel=0.01)
    assert plain.losses[2] < plain.losses[0]


def test_the_run_is_the_demos_but_for_its_size() -> None:
    demo = load_record(TrainConfig, Path("examples/demo.yaml"))
    run = configured(Sizes(144, 4, 512), 7, "cpu")
    assert run.data.paths == demo.data.paths
    assert (run.optimizer, run.schedule, run.seed) == (demo.optimizer, demo.schedule, demo.seed)
    assert run.model.config == {
        **(demo.model.config or {}),
        "hidden_size": 144,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
    }
    assert (run.steps, run.data.tokens_per_step, run.device) == (7, 512, "cpu")
    assert configured(DEVICE_SIZES["cuda"], 7, "cuda").model == demo.model


def test_means_over_windows_are_compared() -> None:
    assert smoothed([1.0, 2.0, 6.0], 2) == [1.5, 4.0]
    assert smoothed([1.0, 2.0, 6.0], 20) == [3.0]
    plain, rounded = Curve((4.0,) * 30, 1.0), Curve((4.0,) * 29 + (4.8,), 1.0)
    apart = differences(plain, rounded)
    assert len(apart) == 11
    assert apart[:10] == [0.0] * 10
    assert apart[10] == pytest.approx(0.01)
    shown = table("", plain, rounded)
    assert list(shown.columns[0].cells) == ["1-20"]

"""Strikes are a function of the seed, and what became of a run is read from its files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.chaos.disturbed_run import (
    CALM_STEPS,
    MOST_STEPS_PER_STRIKE,
    STEPS_PER_STRIKE,
    DisturbedRun,
    HangDetector,
    alone,
    departure,
    draw,
    prepared,
    read_kinds,
    rows,
)
from hydragraph.train.config import TrainConfig
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent
from tests.train.plain import settings


def metrics(step: int, loss: float) -> Metrics:
    return Metrics(step, loss, 1.0, 1e-3, 100, 1000.0, 0.1, "<tp1,pp1>", 4, (1,))


def test_strikes_come_from_the_seed() -> None:
    counts: dict[str, int] = {"kill": 5, "slow": 2, "join": 3}
    strikes = draw(counts, seed=1)
    assert strikes == draw(counts, seed=1) != draw(counts, seed=2)
    assert sorted(strike.kind for strike in strikes) == [*["join"] * 3, *["kill"] * 5, *["slow"] * 2]
    assert [strike.step for strike in strikes] == sorted(strike.step for strike in strikes)
    assert all(2 <= strike.step <= 2 + 10 * STEPS_PER_STRIKE for strike in strikes)


def test_runs_are_long_enough_and_one_survives(tmp_path: Path) -> None:
    config = TrainConfig.load(written(tmp_path))
    peaceful, stormy = prepared(config, tmp_path, strikes=50)
    assert peaceful.steps == stormy.steps == 50 * MOST_STEPS_PER_STRIKE + CALM_STEPS
    assert not peaceful.elastic.survives
    assert stormy.elastic.survives
    assert stormy.home.copies == 2
    assert peaceful.output != stormy.output
    compiled = replace(peaceful, compiled="compiled", trust=True)
    single = alone(compiled, tmp_path)
    assert (single.ranks, single.compiled, single.trust) == (1, None, False)


def test_epochs_and_replanning_are_replaced_where_they_do_not_apply(tmp_path: Path) -> None:
    changed = {"steps": 0, "epochs": 1, "ranks": 2, "strategies": "auto", "elastic": {"replan": True, "dry_run": True}}
    peaceful, stormy = prepared(from_record(TrainConfig, settings(tmp_path) | changed), tmp_path, strikes=10)
    assert peaceful.steps == stormy.steps == 10 * MOST_STEPS_PER_STRIKE + CALM_STEPS
    assert peaceful.replans
    assert not alone(peaceful, tmp_path).replans


def test_kinds_are_read_and_those_that_never_come_are_refused(tmp_path: Path) -> None:
    config = replace(TrainConfig.load(written(tmp_path)), ranks=3)
    assert read_kinds("", replace(config, ranks=1)) == ()
    assert read_kinds("two, again,kill", config) == ("kill", "two", "again")
    for text, changed, words in (
        ("two,none", config, "unknown fault 'none': choose from\n  kill       Kill a rank.\n  slow"),
        ("two", replace(config, ranks=2), "'ranks' is 2: set at least 3, so that a rank survives these faults"),
        ("checkpoint", replace(config, checkpoint_every=0), "set checkpoint_every"),
        ("switch", config, "set elastic.replan"),
        ("preempt", config, "'ranks' is 3: fault 'preempt' needs 2 machines of 2 ranks each"),
    ):
        with pytest.raises(ValueError, match=words):
            read_kinds(text, changed)


def written(folder: Path) -> Path:
    path = folder / "config.yaml"
    from_record(TrainConfig, settings(folder) | {"ranks": 2, "strategies": ["<tp1,pp2>"]}).save(path)
    return path


def test_what_became_of_a_run() -> None:
    def ended(step: int, second: int, loss: float) -> Metrics:
        return replace(metrics(step, loss), time=f"2026-11-22T20:00:{second:02}.000+00:00")

    calm = DisturbedRun(0, (ended(1, 0, 3.0), ended(2, 1, 2.0), ended(3, 2, 1.0)))
    event = RunEvent(
        1, "resumed", (0,), 0.5, "state was lost, so all ranks returned to the checkpoint after step 0", lost_steps=3
    )
    event = replace(event, time="2026-11-22T20:00:01.500+00:00")
    wild = replace(calm, metrics=(ended(1, 0, 3.0), ended(2, 3, 2.0), ended(3, 4, 1.01)), events=(event,), left=(7,))
    assert calm.difference(calm) == 0
    assert math.isclose(wild.difference(calm), 0.01, rel_tol=1e-9)
    assert wild.until(2).difference(calm.until(2)) == 0
    assert calm.difference(replace(calm, metrics=calm.metrics[:1])) == math.inf
    told = dict(rows(wild, calm))
    assert told["goodput"] == "50 tokens/s, 50% of 100"
    assert told["pauses"] == "1: median 0.50 s, longest 0.50 s"
    assert told["times that state was lost"] == "1; 3 steps were trained again"
    assert told["wall time by cause"] == (
        "2.0 s at full speed, 0.5 s of pauses, 1.5 s of lost work, 0.0 s by slower steps"
    )
    assert told["processes left behind"] == "1"
    assert "read in pieces" not in told
    read = replace(event, read_bytes={"memory": 3_000_000, "disk": 500_000, "store": 0})
    told = dict(rows(replace(wild, events=(read, read)), calm))
    words = "6.0 MB from memory, 1.0 MB from disk, 0.0 MB from store; 2 times, median 0.50 s"
    assert told["read in pieces"] == words


def curve(*losses: float) -> DisturbedRun:
    return DisturbedRun(0, tuple(metrics(step, loss) for step, loss in enumerate(losses, start=1)))


def test_rounding_may_grow_as_it_does_undisturbed_and_no_further() -> None:
    plain, control = curve(2.0, 1.0, 1.0), curve(2.0, 1.001, 1.001)
    assert departure(curve(2.0, 1.005, 1.0), plain, control) is None
    assert departure(curve(2.0, 1.02, 1.0), plain, control) == 2
    assert departure(curve(2.001, 1.0, 1.0), plain, control) == 1
    assert departure(curve(2.0, 1.0), plain, control) == 3
    assert departure(curve(2.0, math.nan, 1.0), plain, control) == 2


def test_with_the_same_bits_promised_rounding_explains_nothing() -> None:
    assert departure(curve(3.0, 2.0, 1.0), curve(3.0, 2.0, 1.0), None) is None
    assert departure(curve(3.0, 2.0 + 1e-9, 1.0), curve(3.0, 2.0, 1.0), None) == 2
    assert departure(curve(3.0), curve(3.0, 2.0), None) == 2


def test_the_start_of_a_run_does_not_count_as_a_hang() -> None:
    patience = HangDetector(100.0)
    assert not patience.look(0, 100.0 + 1799.0), "before the first step it has half an hour"
    assert not patience.look(1, 1900.0)
    assert not patience.look(1, 1900.0 + 180.0)
    assert not patience.look(2, 1900.0 + 181.0)
    assert not patience.look(1, 1900.0 + 361.0), "a step that is repeated is progress, too"
    assert patience.look(1, 1900.0 + 542.0) == "the run completed no step for 180 s after step 1, and was killed"
    assert HangDetector(0.0).look(0, 1801.0) == "the run completed no step within 1800 s of its start, and was killed"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            DisturbedRun(2, (), said="output is read-only"),
            "the process exited with code 2; the output ends with:\noutput is read-only",
        ),
        (DisturbedRun(-9, ()), "the process was killed by signal 9; the output is empty"),
        (
            DisturbedRun(-14, (), hung="the run completed no step, and was killed"),
            "the run completed no step, and was killed; the output is empty",
        ),
    ],
)
def test_how_a_run_ended_is_always_said(run: DisturbedRun, words: str) -> None:
    assert run.ending == words

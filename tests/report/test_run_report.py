"""Reports of runs: steps as they were, strategies by their medians, and predictions beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.report.page import html
from hydragraph.report.run_report import run_report
from hydragraph.spec.assignment import Assignment
from hydragraph.train.step_metrics import Metrics
from tests.cost.priced import cluster, costs
from tests.cost.traced import traced

FAST = hg.Strategy.parse("2*<tp1,pp2>", layers=4)
SLOW = hg.Strategy.parse("<tp2,pp2>", layers=4)
STEP = Metrics(
    1, 2.5, 0.3, 1e-3, 100, 100.0, 1.0, str(FAST), 3, (2, 1), None, 0, 0.1, 0.0, 0.2, peak_memory_bytes=10**9
)


def metrics() -> list[Metrics]:
    """Six steps; the slow strategy takes twice as long, and the first step of each three times."""
    found = []
    for i in range(6):
        seconds = (1.0 if i % 2 == 0 else 2.0) * (3.0 if i < 2 else 1.0)
        name = str(FAST if i % 2 == 0 else SLOW)
        step = replace(STEP, step=i + 1, loss=2.5 - i / 10, strategy=name, seconds=seconds, tokens_per_s=100 / seconds)
        found.append(replace(step, eval_loss=2.0 if i == 5 else None))
    return found


def test_a_run_without_a_trace() -> None:
    found = run_report("runs/demo", metrics(), None)
    assert [step.loss for step in found.steps] == [step.loss for step in metrics()]
    assert [row.name for row in found.contenders] == [FAST.name, SLOW.name]
    # The first step of each, which compiles, is left out.
    assert [row.seconds for row in found.contenders] == [1.0, 2.0]
    assert "2 × as long per token" in found.contenders[1].why
    assert dict(found.contenders[0].shares) == pytest.approx({"waits: pull": 0.1, "push": 0.0, "p2p": 0.2})
    assert "train with --trace" in found.source[0]
    assert found.panels == ()
    page = html(found)
    assert "held out" in page
    assert "held-out loss" in page
    assert "loss, nats per token" in page
    assert "tokens/s" in page


def test_losses_are_labelled_with_their_data_and_their_unit() -> None:
    steps = [replace(m, pairs={"margin": 0.1}, eval_losses={"answers": 2.0}) for m in metrics()]
    page = html(run_report("runs/demo", steps, None))
    assert "loss, answers" in page
    assert "loss, per pair" in page
    assert "held out" not in page
    assert "nats" not in page


def test_a_run_that_planned_itself_explains_its_plan() -> None:
    first, *middle, last = metrics()
    lines = ("devices: 4 x cpu", "plan: 2*<tp1,pp2>")
    comparison = "expected 1 s per step, measured 1.1 s (10% more; median of 4 steps)"
    found = run_report("runs/demo", [replace(first, plan=lines), *middle, replace(last, comparison=comparison)], None)
    assert found.words == ("planned before step 1:", *lines, "", f"after step 6: {comparison}")
    page = html(found)
    assert "In words" in page
    assert comparison in page
    assert run_report("runs/demo", metrics(), None).words == ()


def test_a_traced_run_beside_its_simulation() -> None:
    priced = costs(4, cluster(4))
    trace = traced(priced, FAST, Assignment.even([4, 3], [900, 700]), steps=3)
    found = run_report("runs/demo", metrics(), (priced, trace))
    (panel,) = found.panels
    measured, predicted = panel.courses
    assert measured.title == "measured, step 3"
    assert measured.seconds == pytest.approx(predicted.seconds)  # the trace is of a run that went as simulated
    assert found.against is not None
    assert [step.step for step in found.against.steps] == [2, 3]
    for row in found.against.rows:
        assert row.measured == pytest.approx(row.predicted, abs=1e-9)
    assert {row.rank for row in found.against.rows} == {0, 1, 2, 3}
    assert "Predicted and measured" in html(found)

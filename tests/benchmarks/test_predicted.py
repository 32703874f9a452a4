"""Predicted beside measured steps: what is printed is arithmetic over rounds, and a tiny run goes through."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import hydragraph as hg
from benchmarks.memory import Sizes
from benchmarks.predicted import COLUMNS, Round, reported, row, taken
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.stage_kind import StageKind
from tests.cost.priced import profile
from tests.cost.traced import traced
from tests.thorough import thorough

STRATEGY = hg.Strategy.parse("2*<tp1,pp1>", layers=2)
ASSIGNMENT = Assignment.even([2, 1], [300, 500])


def rounds(slower: float, *profiles: Profile) -> list[Round]:
    """Return rounds between profiles, whose steps take `slower` times as long as the first profile predicts."""
    real = profiles[0].cluster(2)
    trace = traced(hg.Costs(profiles[0], real), STRATEGY, ASSIGNMENT)
    step = replace(trace.steps[0], seconds=slower * trace.steps[0].seconds)
    return [Round(before, after, ((step, trace.of(1)),)) for before, after in pairwise(profiles)]


def test_a_step_is_predicted_by_the_profiles_around_it() -> None:
    base = profile(2)
    later = replace(profile(2, slower=1.5), update=(0.0, 0.0), commit_s=0.0)
    found = taken(rounds(1.25, base, base, later), 2)
    assert [len(one.compared) for one in found] == [2, 2]
    assert found[0].ratio == pytest.approx(1 / 1.25)
    assert found[0].ratio < found[1].ratio < 1.25  # the mean with a profile that is slower by half
    line = dict(zip(COLUMNS, row(2, "name", found), strict=True))
    assert line["ratio"] == pytest.approx((found[0].ratio + found[1].ratio) / 2)
    assert (line["from"], line["to"]) == (found[0].ratio, found[1].ratio)
    assert line["steps"] == "2"
    assert "of the whole difference" in str(line["wrong most"])


def test_what_no_profile_could_be_fitted_for_is_left_out() -> None:
    base = profile(2)
    noisy = replace(base, pieces={}, unfit=dict.fromkeys([StageKind(1)], "the fit failed"))
    noisy = replace(noisy, pieces={StageKind(2): base.pieces[StageKind(2)]})
    found = taken(rounds(1.0, base, noisy, noisy), 2)
    assert [len(one.compared) for one in found] == [1]
    assert found[0].ratio == pytest.approx(1.0)


@thorough
def test_a_tiny_run_is_reported() -> None:
    tiny = Sizes(hidden=64, layers=4, vocabulary=257, lengths=(600, 300, 200))
    try:
        report = reported(1, "cpu", (1,), tiny)
    except ValueError as error:
        pytest.skip(f"this machine is too busy: {error}")
    assert {line[1] for line in report.rows} <= {"<tp1,pp1>", "<[0]x4r>"}
    assert all(float(line[COLUMNS.index("measured s")]) > 0 for line in report.rows)
    (target,) = report.targets
    assert target.wanted == "0.9 to 1.1"

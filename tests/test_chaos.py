"""Faults at random instants: a few in every run, others every day; `python -m tests.chaos --count 100` runs many."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import Made, draw_case
from tests.faults import FAULTS, Moment, Outcome
from tests.struck import ACTS, Order
from tests.thorough import thorough

ROOT = Path(__file__).parent.parent
COUNT = 3 * len(FAULTS)  # all kinds, three times


@thorough
def test_todays_faults_end_runs_as_promised_and_what_is_resumed_is_the_same() -> None:
    seed = datetime.date.today().toordinal() * COUNT
    command = [sys.executable, "-m", "tests.chaos", "--count", str(COUNT), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"seed {seed}:\n{done.stdout}")
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}{done.stderr[-3000:]}"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc, as Linux has it")
def test_cases_depend_on_their_seed_alone_and_take_all_kinds_and_moments_in_turn() -> None:
    cases = [draw_case(seed) for seed in range(40 * len(FAULTS))]
    assert cases == [draw_case(seed) for seed in range(40 * len(FAULTS))]
    assert [case.fault for case in cases[: len(FAULTS)]] == list(FAULTS)
    assert {case.order.moment for case in cases} == {moment.value for moment in Moment}
    assert {case.restarts for case in cases} == {0, 1}
    for case in cases:
        assert Moment(case.order.moment) in case.fault.moments
        assert case.order.rank < case.ranks
        assert Order(**vars(case.order)) == case.order
        assert case.fault.heals >= case.restarts
    assert not any(case.fault.mounts for case in (draw_case(seed, mounts=False) for seed in range(100)))


def test_every_kind_of_fault_says_how_it_strikes_and_what_must_follow() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert (fault.strike is None) == bool(fault.act), fault.name
        assert fault.act in ACTS, fault.name
        assert bool(fault.cause) == (fault.outcome is Outcome.FAILS), fault.name


def test_a_difference_between_runs_is_told() -> None:
    made = Made(("1", "2"), "w")
    assert made.differs_from(made) == ""
    assert Made(("1", "3"), "w").differs_from(made) == "another curve (step 2)"
    assert Made(("1",), "w").differs_from(made) == "another curve (1 steps for 2)"
    assert Made(("1", "2"), "v").differs_from(made) == "other weights"

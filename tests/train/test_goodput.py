"""Goodput: the parts of wall time, and that they add up to all of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.train.goodput import account
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

STEP = Metrics(1, 2.5, 0.3, 1e-3, 100, 50.0, 2.0, "<tp1,pp1>", 3, (2,))


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1e9 + seconds, UTC).isoformat()


def steps(*ends: float) -> list[Metrics]:
    return [replace(STEP, step=i, time=at(end)) for i, end in enumerate(ends, start=1)]


def event(name: str, when: float, ranks: tuple[int, ...] = (1,), seconds: float = 0.0) -> RunEvent:
    return RunEvent(1, name, ranks, seconds, "", time=at(when))  # pyrefly: ignore[bad-argument-type]


def test_a_run_that_nothing_happens_to_is_all_at_full_speed() -> None:
    found = account(steps(5, 7, 8, 11))
    assert found is not None
    assert found.goodput == pytest.approx(1)
    assert (found.seconds, found.tokens, found.rate) == pytest.approx((6, 300, 50))


def test_what_a_lost_rank_costs() -> None:
    # Steps of 1 s; the step under way is lost after 0.5 s of it, 2 s go to meeting again, and with a rank less steps
    # take 1.5 s, until it is back, which takes 1 s.
    events = [
        event("fault", 4.5, seconds=0.0),
        event("resumed", 4.5, (0, 1), 2.0),
        event("join", 8.5),
        event("resumed", 8.5, (0, 1, 2), 1.0),
    ]
    found = account(steps(0, 1, 2, 6, 7.5, 9.5, 10.5), [replace(e, lost_steps=i) for i, e in enumerate(events)])
    assert found is not None
    assert found.rate == pytest.approx(100), "of the steps before it, and of the last"
    assert found.paused_s == pytest.approx(3)
    assert found.full_s == pytest.approx(6)
    assert found.lost_s == pytest.approx(1), "0.5 s under way, and 0.5 s that the repeated step was slower"
    assert found.slower_s == pytest.approx(0.5)
    assert found.goodput == pytest.approx(6 / 10.5)
    assert found.pauses == (2.0, 1.0)
    assert found.lost_steps == 6


def test_a_night_between_a_stop_and_its_resumption_is_no_time_of_the_run() -> None:
    events = [event("saved", 3.5), replace(event("resumed", 30_000, (0, 1)), why="continuing")]
    found = account(steps(1, 2, 3, 30_002, 30_003), events)
    assert found is not None
    assert (found.seconds, found.full_s, found.paused_s) == pytest.approx((5.5, 4, 0))
    assert found.lost_s == pytest.approx(1.5), "of saving, and of starting again"
    undone = [events[0], replace(events[1], step=0)]
    lost = account(steps(1, 2, 3, 30_002, 30_003), undone)
    assert lost is not None
    assert lost.seconds == pytest.approx(30_002), "a run that resumed from an earlier checkpoint had failed"


def test_a_new_session_misses_no_rank() -> None:
    events = [event("fault", 2), event("resumed", 2.5, (0, 1, 2), 0.5), event("saved", 4.5), event("resumed", 99, (0,))]
    found = account(steps(0, 1, 3, 4, 100, 100.5, 101), events)
    assert found is not None
    assert found.rate == pytest.approx(150), "of step 2, and of the last two"


def test_steps_beside_a_slow_rank_are_not_undisturbed() -> None:
    events = [event("straggler", 2.5), event("recovered", 6.5)]
    found = account(steps(0, 1, 2, 4, 6, 7), events)
    assert found is not None
    assert found.rate == pytest.approx(100)
    assert found.slower_s == pytest.approx(2)
    assert found.goodput == pytest.approx(5 / 7)


def test_a_rate_that_is_not_known_is_no_goodput_and_one_that_is_given_counts() -> None:
    events = [event("fault", -1.0)]
    found = account(steps(0, 2, 4), events)
    assert found is not None
    assert found.goodput is None
    assert found.tokens_per_s == pytest.approx(50)
    given_rate = account(steps(0, 2, 4), events, rate=100.0)
    assert given_rate is not None
    assert given_rate.goodput == pytest.approx(0.5)


def test_runs_of_earlier_versions_have_no_account() -> None:
    assert account([STEP, replace(STEP, step=2)]) is None
    assert account([]) is None


NAMES = st.sampled_from(["fault", "leave", "join", "resumed", "straggler", "recovered", "switch"])
EVENTS = st.lists(st.tuples(NAMES, st.floats(0, 100), st.floats(0, 30)), max_size=12)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=12), EVENTS, st.sampled_from([None, 7.0]))
def test_nothing_of_the_time_is_missing(gaps: list[float], told: list[tuple[str, float, float]], rate: float) -> None:
    ends = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    events = [event(name, when, seconds=took) for name, when, took in sorted(told, key=lambda each: each[1])]
    found = account(steps(*ends), events, rate)
    assert found is not None
    assert found.seconds == pytest.approx(ends[-1] - ends[0], abs=1e-5)
    assert found.full_s + found.paused_s + found.lost_s + found.slower_s == pytest.approx(found.seconds, abs=1e-5)
    assert 0 <= found.paused_s <= found.seconds + 1e-5

"""Timelines: ranks that are alike share a lane, no second is lost, and many instructions become few bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hydragraph.ir.instruction import Stream
from hydragraph.report import timelines
from hydragraph.report.facts import STREAMS, IterationView, TimeBar
from hydragraph.report.timelines import measured_course, simulated_course
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from tests.cost.priced import cluster, costs
from tests.cost.traced import traced
from tests.report.made import four, simulated


def busy(bars: Sequence[TimeBar]) -> float:
    return sum(bar.end - bar.begin for bar in bars)


def kinds(course: IterationView) -> set[str]:
    return {bar.kind for lane in course.lanes for bars in lane.bars for bar in bars}


@pytest.mark.parametrize("text", ["<tp2,pp2>", "2*<tp1,pp2>", "<[0,1]x1,[2]x3>"])
def test_every_rank_has_a_lane_and_all_its_seconds(text: str) -> None:
    timeline = simulated(four(), text, [4] * (1 + text.startswith("2"))).timeline
    course = simulated_course(timeline)
    assert [lane.ranks for lane in course.lanes] == [(rank,) for rank in range(4)]
    for lane in course.lanes:
        for stream in STREAMS:
            expected = timeline.busy_s(lane.ranks[0], Stream(stream))
            assert busy(lane.bars[STREAMS.index(stream)]) == pytest.approx(expected, abs=1e-12)
    assert course.seconds == timeline.seconds
    assert kinds(course) >= {"forward", "backward", "pull", "push", "update"}


def test_the_critical_path_fills_the_iteration_and_names_its_ranks() -> None:
    course = simulated_course(simulated(four(), "<tp2,pp2>", [4]).timeline)
    assert course.critical.steps[0].begin_s == pytest.approx(0)
    assert course.critical.steps[-1].end_s == pytest.approx(course.seconds)
    for one, other in pairwise(course.critical.steps):
        assert one.end_s == pytest.approx(other.begin_s)
    # Where a step says that ranks compute, these have bars there.
    lanes = {rank: lane for lane in course.lanes for rank in lane.ranks}
    for step in course.critical.steps:
        bars = lanes[step.ranks[0]].bars[STREAMS.index(step.stream.value)]
        assert any(bar.begin < step.end_s and bar.end > step.begin_s for bar in bars), step


def test_many_ranks_that_are_alike_share_lanes() -> None:
    on = costs(4, cluster(64, 8))
    course = simulated_course(simulated(on, "16*<tp2,pp2>", [4] * 16).timeline)
    assert sorted(rank for lane in course.lanes for rank in lane.ranks) == list(range(64))
    assert len(course.lanes) < 64


def test_too_many_instructions_are_merged_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = simulated(four(), "<tp2,pp2>", [6]).timeline
    whole = simulated_course(timeline)
    count = sum(len(bars) for lane in whole.lanes[::2] for bars in lane.bars)  # ranks of a stage share theirs
    assert whole.note == ""
    for most in (count - 1, count // 10):
        monkeypatch.setattr(timelines, "MOST_BARS", most)
        course = simulated_course(timeline)
        assert sum(len(bars) for lane in course.lanes[::2] for bars in lane.bars) <= most
        assert "one" in course.note
        for merged, lane in zip(course.lanes, whole.lanes, strict=True):
            for bars, before in zip(merged.bars, lane.bars, strict=True):
                assert busy(bars) >= busy(before) - 1e-12
                assert [b.begin for b in bars[:1]] == [b.begin for b in before[:1]]
                assert [b.end for b in bars[-1:]] == [b.end for b in before[-1:]]


def test_ranks_beyond_what_can_be_drawn_are_chosen_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_LANES", 2)
    course = simulated_course(simulated(four(), "<[0]x1,[1]x1,[2]x1,[3]x1>", [4]).timeline)
    assert [lane.ranks for lane in course.lanes] == [(0,), (3,)]
    assert "2 of 4 kinds of ranks" in course.note


def test_a_trace_shows_what_ran_and_what_was_waited_for() -> None:
    on = four().changed(home=Home())  # weights come from other ranks
    run = simulated(on, "<tp2,pp2>", [4])
    trace = traced(on, run.strategy, Assignment.even([4], 900))
    course = measured_course("measured, step 1", trace.of(1))
    assert course.seconds == pytest.approx(run.timeline.seconds)
    assert len(course.lanes) == 4
    assert {"forward", "backward", "wait", "pull", "push", "p2p"} <= kinds(course)
    names = {bar.name for lane in course.lanes for bar in lane.bars[0]}
    assert "forward layer.0" in names
    assert any(name.startswith("wait for weights W.") for name in names)

"""A plan's report: its numbers are those of the planner, its parts add up, its text is golden.

HYDRAGRAPH_UPDATE_GOLDEN=1 rewrites tests/report/golden/plan.txt; read the difference before you commit it.
"""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph import planner
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines
from hydragraph.report.candidate_comparison import PlanReport, TimeParts, explain, mini_batches, parts_of, scheme_counts
from hydragraph.report.candidate_comparison_text import to_record, to_text
from tests.planner.examples import MIXED, PROFILE, lengths, pipelines

GOLDEN = Path(__file__).parent / "golden" / "plan.txt"
DATA = lengths(3000, 0, 12000)


@cache
def report() -> PlanReport:
    return explain(PROFILE, [*DATA, 15000], 16, 12000, 40_000, iterations=3)


def test_the_text_is_golden() -> None:
    text = to_text(report(), explain=True)
    if os.environ.get("HYDRAGRAPH_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), f"{GOLDEN} differs; if that is meant, see this file's head"


def test_the_example_of_the_module() -> None:
    kinds = (PipelineCost(0.0, 1.0, 0.0, 1, 9, 1, 1), PipelineCost(0.0, 1.0, 1.0, 2, 9, 1, 2))
    assignment = PlannedAssignment((((0,),), ((1,), (2,))), (3, 4, 2), by_pipeline=(3.0, 12.0))
    assert kinds[1].seconds([[4], [2]]) == pytest.approx(12.0)
    assert parts_of(kinds, [3, 4, 2], assignment, 0.0) == TimeParts(5.0, 1.0, 2.0, 4.0, 0.0)


def test_seconds_are_those_of_the_planner() -> None:
    batches = mini_batches([min(n, 12000) for n in [*DATA, 15000]], 40_000, 3, 0)
    for candidate in report().candidates[:3]:
        charge = 0.3 * (not candidate.homogeneous)
        expected = fmean(planner.assign(candidate.strategy, PROFILE, b).seconds for b in batches) + charge
        assert candidate.assigned
        assert candidate.seconds == pytest.approx(expected)
        assert candidate.bound <= candidate.seconds * (1 + 1e-9)
    strategies = [c.strategy for c in report().candidates]
    assert report().dynamic == pytest.approx(fmean(planner.compare(strategies, PROFILE, b).seconds for b in batches))


def test_the_best_takes_the_context_and_nothing_that_does_beats_it() -> None:
    found = report()
    assert found.best.max_len >= found.context
    assert found.best.why == ""
    able = [c for c in found.candidates if c.max_len >= found.context]
    assert found.best.seconds == min(c.seconds for c in able)  # those not assigned stand with their bounds
    assert found.homogeneous is not None
    assert len(set(found.homogeneous.strategy)) == 1
    assert found.dynamic <= found.best.seconds * (1 + 1e-9)
    assert sum(c.wins for c in found.candidates) == found.iterations
    assert all(c.why for c in found.candidates[1:])
    assert found.cut == 1


def test_no_candidate_takes_less_than_its_longest_sequence_alone() -> None:
    batches = mini_batches([min(n, 12000) for n in [*DATA, 15000]], 40_000, 3, 0)
    for candidate in report().candidates:
        assert candidate.alone <= candidate.seconds * (1 + 1e-9)
    alike = next(c for c in report().candidates if c.homogeneous and c.fits == 3)
    cost = PROFILE.pipeline(alike.strategy[0], alike.devices)
    assert alike.alone == pytest.approx(fmean(cost.stages * cost.micro_batch_seconds([max(b)]) for b in batches))


@given(pipelines(), st.lists(st.integers(0, 2000), min_size=1, max_size=12))
@settings(max_examples=max(20, settings.default.max_examples // 2))
def test_parts_add_up_to_the_seconds(kinds: tuple[PipelineCost, ...], sizes: list[int]) -> None:
    assignment = assign_pipelines(kinds, sizes)
    parts = parts_of(kinds, sizes, assignment, 0.25)
    assert parts.seconds == pytest.approx(assignment.seconds + 0.25)
    assert parts.bubble >= -1e-9


def test_memory_adds_up_to_the_device_at_max_len() -> None:
    for candidate in report().candidates:
        for room in candidate.memory:
            assert room.states is not None
            assert room.per_token is not None
            assert room.reserved is not None
            assert room.device is not None
            used = room.states + room.reserved + room.max_len * room.per_token
            assert used <= room.device < used + room.per_token


def test_mini_batches_have_the_tokens_and_use_all_data_before_any_twice() -> None:
    batches = mini_batches(DATA[:200], 20_000, 3, 5)
    assert batches == mini_batches(DATA[:200], 20_000, 3, 5) != mini_batches(DATA[:200], 20_000, 3, 6)
    assert all(sum(b) >= 20_000 > sum(b[:-1]) for b in batches)
    assert sorted(mini_batches([1, 2, 3, 4], 10, 2, 0)[1]) == [1, 2, 3, 4]


def test_own_strategies_are_compared_as_given() -> None:
    found = explain(PROFILE, DATA, 32, 12000, 40_000, strategies=[MIXED, [(8, 1)] * 4, [(1, 1)] * 8], iterations=1)
    assert {c.strategy for c in found.candidates} == {tuple(MIXED), ((8, 1),) * 4, ((1, 1),) * 8}
    last = found.candidates[-1]
    assert last.strategy == ((1, 1),) * 8
    assert f"fits at most {last.max_len:,} tokens" in last.why
    assert scheme_counts(MIXED).startswith("<tp8,pp1> + <tp4,pp2>")


def test_the_record_is_strict_json() -> None:
    record = json.loads(json.dumps(to_record(report()), allow_nan=False))
    assert [c["text"] for c in record["candidates"]] == [scheme_counts(c.strategy) for c in report().candidates]
    assert all(c["seconds"] is None or math.isfinite(c["seconds"]) for c in record["candidates"])
    example = record["example"]
    used = sorted(i for p in example["micro_batches"] for m in p for i in m)
    assert used == list(range(len(example["lengths"])))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4\*<tp8,pp1> needs 32 devices, but there are 16"):
        explain(PROFILE, DATA, 16, 12000, strategies=[[(8, 1)] * 4])
    with pytest.raises(ValueError, match="0 sequences"):
        explain(PROFILE, [], 16, 12000)
    with pytest.raises(hg.Unsupported, match="no measured scheme fits 500000 tokens"):
        explain(PROFILE, [500_000], 16, 500_000)

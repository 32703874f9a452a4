"""Compiled stages take and end as `stage_costs` and `schedule_replay` say; lines for bounds are nowhere above them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.compiled_replay import FORWARD, PARTS, replay, scratch_of
from hydragraph.cost.curves import Constants
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.reach import AttentionReach
from hydragraph.cost.stage_arrays import StageTerms, add_pairs, fill_row, pairs_of, stage_terms, table_at
from hydragraph.cost.stage_costs import NeighborMessages, StageCost
from hydragraph.spec.cluster import Interconnect
from tests.planner.examples import pipelines, with_stages

BATCHES = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=3), min_size=1, max_size=9)


def end(terms: StageTerms, batches: list[list[int]]) -> float:
    stages = int(terms.stages[0])
    rows = np.zeros((len(batches), stages, PARTS))
    for row, batch in zip(rows, batches, strict=True):
        near = np.zeros(len(terms.reaches))
        for length in batch:
            add_pairs(near, terms.reaches, float(length), 1.0)
        fill_row(row, terms.seconds[0], stages, float(sum(n * n for n in batch)), float(sum(batch)), near)
    order = np.arange(len(batches))
    return float(replay(table_at(terms, 0), stages, rows, order, len(batches), scratch_of(stages, len(batches))))


def test_the_example_of_the_module() -> None:
    stage = StageCost(
        (((1.0, Constants(0.0, 2.0, 0.0)),), ((1.0, Constants(0.0, 3.0, 1.0)),)),
        (((1.0, Constants(0.0, 1.0, 0.0)),), ((1.0, Constants(0.0, 1.0, 0.0)),)),
    )
    terms = stage_terms([PipelineCost(0.0, 4.0, 1.0, 1, 99, 1, 1, (stage,))], 1)
    row = np.zeros((1, PARTS))
    fill_row(row, terms.seconds[0], 1, 52.0, 10.0, np.zeros(0))
    assert row[0, FORWARD] == 31.0


@given(pipelines(most=1).flatmap(lambda kinds: st.one_of(st.just(kinds[0]), with_stages(kinds[0]))), BATCHES)
@settings(max_examples=80)
def test_a_pipeline_ends_when_its_cost_says(kind: PipelineCost, batches: list[list[int]]) -> None:
    terms = stage_terms([kind], len(batches))
    true = kind.seconds(batches)
    if terms.faithful[0]:
        assert end(terms, batches) == pytest.approx(true, rel=1e-9)
    assert end(stage_terms([kind], len(batches), lower=True), batches) <= true * (1 + 1e-9)


@given(BATCHES, st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=30)
def test_windows_and_chunks_cost_what_curves_say(batches: list[list[int]], window: int, chunk: int) -> None:
    first = Constants(1e-6, 1e-3, 0.1, ((AttentionReach(window), 1e-5),))
    second = Constants(0.0, 1e-3, 0.1, ((AttentionReach(chunk=chunk), 2e-5), (AttentionReach(window, chunk), 1e-5)))
    stages = tuple(StageCost((((1.0, k),),), (((2.0, k),),)) for k in (first, second))
    kind = PipelineCost(0.0, 1.0, 0.5, 2, 9999, 1, 2, stages)
    for lower in (False, True):
        assert end(stage_terms([kind], len(batches), lower), batches) == pytest.approx(kind.seconds(batches))


@given(st.integers(0, 99), st.none() | st.integers(1, 99), st.none() | st.integers(1, 99))
def test_compiled_pairs_are_those_of_the_reach(length: int, window: int | None, chunk: int | None) -> None:
    reach = AttentionReach(window, chunk)
    assert pairs_of(*reach.order, float(length)) == reach.pairs(length)


def test_kinds_of_other_depths_stand_side_by_side() -> None:
    flat = PipelineCost(0.0, 1.0, 0.5, 1, 99, 1, 1)
    deep = replace(flat, stages=3)
    terms = stage_terms([flat, deep], 1)
    assert terms.seconds.shape == (2, 3, 1, PARTS, 3)
    assert terms.stages.tolist() == [1, 3]
    assert terms.faithful.all()


def test_links_with_measured_points_are_left_to_exact_seconds() -> None:
    kind = PipelineCost(0.0, 1.0, 0.5, 2, 99, 1, 1)
    first, second = (StageCost((((1.0, kind.envelope),),), (((2.0, kind.envelope),),)) for _ in range(2))
    stages = (replace(first, ahead=NeighborMessages((Interconnect(1e9, 0.0, ((1e3, 1e8),)),), 4096)), second)
    assert not stage_terms([replace(kind, parts=stages)], 1).faithful[0]
    assert stage_terms([replace(kind, parts=(first, second))], 1).faithful[0]

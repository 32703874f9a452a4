"""Equal sequences: every sequence runs once, within MaxLen, and about as early as by the search for varying lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.assignment.equal_sequences import equally_long
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.planner.test_micro_batch_sizes import STRATEGIES


@settings(max_examples=max(10, settings.default.max_examples // 50), deadline=None)
@given(
    st.sampled_from((*STRATEGIES, "<tp1,pp4>", "<tp2,pp2>", "<[0]x2,[1]x4> + <[2]x4,[3]x2>")),
    st.integers(1, 60),
    st.sampled_from((50, 300, 3000)),
    st.sampled_from((1.0, 1.6, 12.0)),
    st.sampled_from((1000, 8_000_000)),
)
def test_equal_sequences_end_about_as_early_as_by_the_search(
    text: str, sequences: int, length: int, rate: float, elements: int
) -> None:
    costs = priced.costs(6, priced.cluster(4), hg.Health({0: rate}), elements)
    pipelines = costs.pipelines(Strategy.parse(text, 6))
    lengths = [length] * sequences
    try:
        run = assign_pipelines(pipelines, lengths)
    except hg.Unsupported:
        with pytest.raises(hg.Unsupported):
            equally_long(pipelines, lengths)
        return
    found, last = equally_long(pipelines, lengths)
    assert sorted(i for p in found.micro_batches for m in p for i in m) == list(range(sequences))
    by_pipeline = list(zip(pipelines, found.tokens, strict=True))
    assert all(sum(m) <= pipeline.max_len for pipeline, batches in by_pipeline for m in batches)
    assert last == pytest.approx(max(p.seconds(batches) if batches else 0.0 for p, batches in by_pipeline))
    assert run.bound * (1 - 1e-9) <= last <= 1.03 * run.seconds

"""The critical path explains all of an iteration: its steps follow one another, and add up to the end."""

from __future__ import annotations

import pytest

import hydragraph as hg
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import cluster, costs


@pytest.mark.parametrize("text", ["<tp1,pp2>", "<tp2,pp1> + <tp1,pp2>", "<[0]x3,[1]x1>"])
def test_its_steps_follow_one_another_to_the_end(text: str) -> None:
    strategy = Strategy.parse(text, 4)
    timeline = hg.simulate(
        costs(4, cluster(max(strategy.devices) + 1), elements=10**5),
        strategy,
        Assignment.even([4] * len(strategy.pipelines), 1000),
    )
    path = timeline.critical_path
    assert sum(path.by_kind.values()) == pytest.approx(timeline.seconds, rel=1e-6)
    for before, after in zip(path.steps, path.steps[1:], strict=False):
        assert before.begin_s + before.seconds <= after.begin_s + 1e-9
    assert str(path).startswith(f"the critical path of {1e3 * timeline.seconds:.4g} ms: ")

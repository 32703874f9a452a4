"""No assignment to any pipelines of some devices ends before their bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.device_bound import bound_devices
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from tests.planner.examples import pipelines


@given(pipelines(most=1), pipelines(most=1), st.lists(st.integers(0, 2000), max_size=8), st.integers(1, 3))
@settings(max_examples=max(20, settings.default.max_examples // 16))
def test_no_strategy_beats_the_bound_of_its_devices(
    one: tuple[PipelineCost, ...], other: tuple[PipelineCost, ...], sizes: list[int], devices: int
) -> None:
    kinds = (*one, replace(*other, devices=2))
    bound = bound_devices(kinds, sizes, devices)
    for count in range(1, devices + 1):
        for strategy in itertools.combinations_with_replacement(kinds, count):
            if sum(k.devices for k in strategy) <= devices:
                assert bound <= assign_pipelines(strategy, sizes).seconds * (1 + 1e-9)


def test_the_bound_of_devices_is_reached_where_work_can_be_divided() -> None:
    kind = PipelineCost(a=1e-9, b=1e-3, c=0.0, stages=1, max_len=2000, util_len=1, devices=2)
    dear = replace(kind, b=1.0, devices=1)
    assert bound_devices([kind, dear], [10] * 800, 8) == pytest.approx(800 * 10 * 1e-3 / 4, rel=1e-3)
    assert bound_devices([kind, dear], [1000, 10], 8) == pytest.approx(1.001, rel=1e-3)  # one sequence cannot be cut


def test_the_bounds_example() -> None:
    kind = PipelineCost(a=0.0, b=1.0, c=1.0, stages=2, max_len=10**12, util_len=1, devices=2)
    assert bound_devices([kind], [4, 4], 2) == pytest.approx(13.0, rel=1e-5)
    assert assign_pipelines([kind], [4, 4]).seconds == pytest.approx(15.0)
    assert bound_devices([kind], [0], 2) == 0.0
    with pytest.raises(ValueError, match="more than any pipeline can hold"):
        bound_devices([replace(kind, max_len=3)], [4], 2)

"""Costs of shared stages for each of their pipelines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.shared_stage_costs import turns
from hydragraph.spec.strategy import Strategy

FAN_IN = Strategy.parse("<[0]x1,[2]x1> + <[1]x1,[2]x1>", 2)


def test_turns_by_hand() -> None:
    assert turns(FAN_IN, [1.0, 1.0]) == ((1, 2), (1, 2))
    assert [times[1] for times in turns(FAN_IN, [3.0, 1.0])] == pytest.approx([4, 4 / 3])
    chain = Strategy.parse("<[0]x1,[2]x1> + <[1]x1,[2]x1> + <[1]x1,[3]x1>", 2)
    assert turns(chain, [1.0] * 3) == ((1, 2), (2, 2), (2, 1))


@given(st.tuples(*[st.floats(0.1, 10)] * 2), st.tuples(*[st.floats(0, 10)] * 2))
def test_no_load_of_a_shared_stage_is_priced_below_itself(seconds: tuple[float, ...], work: tuple[float, ...]) -> None:
    priced = [w * times[1] for w, times in zip(work, turns(FAN_IN, seconds), strict=True)]
    assert max(priced) >= sum(work) * (1 - 1e-12)


def test_a_pipeline_that_shares_nothing_keeps_its_own_seconds() -> None:
    for times in turns(Strategy.parse("2*<tp2,pp2>", 2), [0.3, 7.0]):
        assert times == pytest.approx((1.0, 1.0))

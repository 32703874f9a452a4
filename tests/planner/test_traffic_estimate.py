import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.planner.traffic_estimate import Iterations
from tests.cost import priced

SHAPES = [
    "<[0]x3,[1]x3> + <[2]x4,[3]x2>",
    "<[0,1]x3,[2]x2,[3]x1>",
    "<[0]x6> + <[1]x6> + <[2,3]x6>",
    "<[0]x1,[1]x5> + <[2]x6>",
]


@settings(max_examples=max(12, settings.default.max_examples // 32))
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([1000, 100_000, 1_000_000]),
    st.lists(st.sampled_from([1.0, 2.57]), min_size=4, max_size=4),
    st.integers(1, 9),
    st.integers(1, 2),
)
def test_it_is_near_a_simulation(text: str, elements: int, rates: list[float], count: int, copies: int) -> None:
    health = hg.Health({rank: x for rank, x in enumerate(rates) if x > 1})
    costs = priced.costs(6, priced.mixed(), health, elements=elements, home=hg.Home(copies=copies))
    strategy = hg.Strategy.parse(text, 6)
    assignment = hg.Assignment.even([count] * len(strategy.pipelines), [700] * len(strategy.pipelines))
    simulated = costs.simulate(strategy, assignment).seconds
    assert Iterations(costs, strategy).seconds(assignment) == pytest.approx(simulated, rel=0.05)
    assert costs.pipelines_end(strategy, assignment) <= simulated * (1 + 1e-9)

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.planner.iteration_bound import bound
from hydragraph.planner.price_candidate import share_out
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from tests.cost import priced

STRATEGIES = (
    "4*<tp1,pp1>",
    "2*<tp2,pp1>",
    "2*<tp1,pp2>",
    "<tp2,pp1> + <tp1,pp2>",
    "<[0]x1,[2]x3> + <[1]x2,[3]x2>",
    "<[0]x4> + <[1]x4>",
)


@given(st.sampled_from(STRATEGIES), st.lists(st.floats(1.0, 13.0), min_size=4, max_size=4), st.integers(1, 12))
def test_no_strategy_beats_it(text: str, rates: list[float], sequences: int) -> None:
    costs = priced.costs(4, priced.mixed(), Health(dict(enumerate(rates))))
    lengths = [700] * sequences
    strategy = Strategy.parse(text, layers=4)
    assignment, last = share_out(costs, strategy, lengths, 1)
    assert bound(costs, [lengths]) <= last * (1 + 1e-9)
    assert last == pytest.approx(costs.pipelines_end(strategy, assignment))


def test_stragglers_raise_it_as_malleus_says() -> None:
    """T_opt of Malleus: N / ((N - n) + sum 1 / x), where devices and blocks are alike and the work is large."""
    lengths = [1000] * 4000
    healthy = bound(priced.costs(4, priced.cluster(8)), [lengths])
    slow = bound(priced.costs(4, priced.cluster(8), Health({0: 2.57, 5: 12.53})), [lengths])
    assert slow / healthy == pytest.approx(8 / (6 + 1 / 2.57 + 1 / 12.53))


def test_a_sequence_has_to_go_through_all_layers() -> None:
    costs = priced.costs(4, priced.cluster(8))
    alone = bound(costs, [[5000]])
    strategy = Strategy.parse("<tp4,pp1>", layers=4)
    _, last = share_out(costs, strategy, [5000], 1)
    # A backward takes 2.2 forwards, and under zb-h1 half of it is not waited for.
    assert alone == pytest.approx(last * (1 + 1.1) / (1 + 2.2), rel=0.01)


def test_devices_too_few_for_the_measured_degrees_provide_no_time() -> None:
    profiles = [priced.profile(4, "fast"), priced.profile(4, "slow", 2.5)]
    pairs = {kind: of for kind, of in profiles[1].pieces.items() if kind.tp == 2}
    measured = Profile.merge([profiles[0], replace(profiles[1], pieces=pairs)])
    alone = Costs(measured, priced.mixed(), Health({3: math.inf}))
    without = Costs(measured, priced.mixed(), Health({2: math.inf, 3: math.inf}))
    assert bound(alone, [[700] * 9]) == pytest.approx(bound(without, [[700] * 9]))
    assert hg.plan(alone, hg.Workload(sequences=8, length=700)).gap >= 0
    nothing = Costs(replace(profiles[0], pieces=pairs), priced.cluster(1))
    assert bound(nothing, [[700]]) == math.inf
    with pytest.raises(Unsupported):
        hg.plan(nothing, hg.Workload(sequences=8, length=700))

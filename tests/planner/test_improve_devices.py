import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.planner.improve_devices import DeviceMoves, climbed
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from tests.cost import priced

# One long sequence wants a large group, many short ones want small groups.
WORKLOAD = hg.Workload(lengths=[[6000, *[300] * 40]])


def yard_of(costs: hg.Costs) -> DeviceMoves:
    return DeviceMoves(costs, WORKLOAD, WORKLOAD.longest, 0.99)


@settings(max_examples=10)
@given(
    st.dictionaries(st.integers(0, 7), st.sampled_from([1.5, 5.42, math.inf]), max_size=5),
    st.sampled_from(["8*<tp1,pp1>", "4*<tp2,pp1>", "2*<tp4,pp1>", "2*<tp2,pp2>", "<tp2,pp4>"]),
)
def test_moves_are_strategies_of_devices_that_run(rates: dict[int, float], text: str) -> None:
    costs = priced.costs(6, priced.cluster(8, 4), hg.Health(rates))
    lost = set(costs.health.lost)
    start = hg.Strategy.parse(text, 6)
    kept = tuple(p for p in start.pipelines if not lost & set(p.devices))
    if not kept:
        return
    start = hg.Strategy(kept)
    moves = list(yard_of(costs).moves(start))
    assert start not in moves
    for move in moves:
        move.check(6, 8, costs.sizes.heads)
        assert not lost & set(move.devices)
        assert all(len({costs.cluster.node_of(d) for d in s.devices}) == 1 for p in move.pipelines for s in p.stages)


def test_moves_lead_from_small_groups_to_large_ones_and_back() -> None:
    costs = priced.costs(6, priced.cluster(8, 4))
    texts = ("8*<tp1,pp1>", "4*<tp2,pp1>", "2*<tp4,pp1>", "4*<tp1,pp2>")
    by_shape = {
        text: {tuple(sorted((s.tp, len(p.stages)) for p in move.pipelines for s in p.stages)) for move in moves}
        for text in texts
        for moves in [list(yard_of(costs).moves(hg.Strategy.parse(text, 6)))]
    }
    for text in texts:
        for other in texts:
            shape = tuple(
                sorted((s.tp, len(p.stages)) for p in hg.Strategy.parse(other, 6).pipelines for s in p.stages)
            )
            assert text == other or shape in by_shape[text], (text, other)


@pytest.mark.parametrize("rates", [{}, {1: 5.42}])
def test_climbing_is_never_worse_and_gives_long_sequences_large_groups(rates: dict[int, float]) -> None:
    costs = priced.costs(6, priced.cluster(8, 4), hg.Health(rates))
    varied = MiniBatchPrices(costs, WORKLOAD.lengths)
    start = hg.Strategy.parse("8*<tp1,pp1>", 6)
    found = climbed(varied, [yard_of(costs)], start, None)
    assert varied.seconds(found) < varied.seconds(start)
    assert len({s.tp for p in found.pipelines for s in p.stages}) > 1
    assert climbed(varied, [yard_of(costs)], start, None, priced=0) == start

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.corrections import Corrections
from hydragraph.cost.costs import Costs
from hydragraph.planner.traffic_bound import CardBound
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node, Pair
from tests.cost import priced

SHAPES = [
    "<[0]x3,[1]x3> + <[2]x4,[3]x2>",
    "<[0,1]x3,[2]x2,[3]x1>",
    "<[0]x6> + <[1]x6> + <[2,3]x6>",
    "<[0]x1,[1]x5> + <[2]x6>",
    "4*<tp1,pp1>",
    "<[2]x6>",
]
TYPES = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}


@settings(max_examples=max(30, settings.default.max_examples // 16))
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([(4,), (2, 2), (1, 3), (1, 1, 2)]),
    st.lists(st.sampled_from([1e6, 3e6, 1e8]), min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 1e6, 1e9]),
    st.sampled_from([1.0, 0.3, 2.0]),
    st.sampled_from([4, 2]),
)
def test_no_iteration_ends_before_whoever_owns_the_state(
    text: str,
    nodes: tuple[int, ...],
    links: list[float],
    shares: list[int],
    copies: int,
    pair: float | None,
    factor: float,
    push_itemsize: int,
) -> None:
    every = (
        Node("fast" if n > 1 else "slow", n, priced.FAST, Interconnect(link, 1e-6), cards=min(2, n))
        for n, link in zip(nodes, links, strict=False)
    )
    given_home = hg.Home(shares, copies=copies, nodes=(0, 1, 2, 3))
    if copies > sum(map(bool, shares)):
        given_home = hg.Home(copies=copies, nodes=(0, 1, 2, 3))
    machines = tuple(every)
    types = {node.type: TYPES[node.type] for node in machines}
    direct = () if pair is None or len(types) < 2 else (Pair(("fast", "slow"), pair, 1e-6),)
    costs = priced.costs(6, Cluster.of(types, machines, direct), elements=100_000, home=given_home)
    measured = {(kind, rank): (factor,) * 8 for kind in (TimeKind.PULL, TimeKind.PUSH) for rank in range(4)}
    named = tuple(costs.cluster.type_of(rank) for rank in range(4))
    costs = Costs(
        costs.profile,
        costs.cluster,
        home=given_home,
        corrections=Corrections(named, measured),
        push_itemsize=push_itemsize,
    )
    strategy = hg.Strategy.parse(text, 6)
    assignment = hg.Assignment.even([1] * len(strategy.pipelines), [700] * len(strategy.pipelines))
    assert CardBound(costs).least_s(strategy) <= costs.simulate(strategy, assignment).seconds * (1 + 1e-9)


def test_it_is_most_of_an_iteration_that_waits_for_cards() -> None:
    node = Node("fast", 2, priced.FAST, Interconnect(1e6, 1e-6))
    costs = priced.costs(6, Cluster.of({"fast": TYPES["fast"]}, (node, node)), elements=100_000)
    strategy = hg.Strategy.parse("<[0]x3,[1]x3> + <[2]x3,[3]x3>", 6)
    seconds = costs.simulate(strategy, hg.Assignment.even([1] * 2, [700] * 2)).seconds
    assert CardBound(costs).least_s(strategy) == pytest.approx(seconds, rel=0.15)


def test_a_single_node_carries_nothing() -> None:
    assert CardBound(priced.costs(6, priced.cluster(4))).least_s(hg.Strategy.parse("4*<tp1,pp1>", 6)) == 0

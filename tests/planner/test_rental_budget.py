"""Nodes to rent within a budget, compared with all combinations of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.plan import NEAR
from hydragraph.planner.rental_budget import MOST, affordable, offers
from hydragraph.planner.rental_price import RentalPrices
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.home import Home
from tests.cost import priced
from tests.thorough import only

WORK = hg.Workload(sequences=16, length=500)


def costs_of(fast: int, slow: int, memory: int = 10**9, health: hg.Health | None = None) -> Costs:
    """Return costs of nodes of two fast and of one slow device."""
    types = {"fast": DeviceType(1e15, memory, 1e12), "slow": DeviceType(4e14, memory, 1e12)}
    sizes = {"fast": (2, fast), "slow": (1, slow)}
    nodes = (Node(name, size, priced.FAST, priced.SLOW, count=n, cards=size) for name, (size, n) in sizes.items() if n)
    return priced.costs(2, Cluster.of(types, tuple(nodes)), health)


def prices_of(costs: Costs, per_hour: Mapping[str, float]) -> RentalPrices:
    return RentalPrices(costs.cluster, {name: per_hour[name] for name in costs.cluster.types})


def planned(costs: Costs) -> hg.Plan:
    return hg.plan(costs, WORK, streaming=False)


def counted(costs: Costs, ranks: tuple[int, ...]) -> tuple[int, int]:
    types = Counter(costs.cluster.type_of(rank) for rank in ranks)
    assert types["fast"] % 2 == 0, "nodes are rented whole"
    return types["fast"] // 2, types["slow"]


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40))
def test_no_node_can_be_added_to_what_is_affordable(fast: int, slow: int, a: int, b: int, budget: int) -> None:
    if not fast + slow:
        return
    costs = costs_of(fast, slow)
    node = {"fast": 2 * a, "slow": b}
    able = [
        (i, j)
        for i, j in product(range(fast + 1), range(slow + 1))
        if i * node["fast"] + j * node["slow"] <= budget and i + j > 0
    ]
    wanted = {(i, j) for i, j in able if not any((i + di, j + dj) in able for di, dj in ((1, 0), (0, 1)))}
    prices = prices_of(costs, {"fast": a, "slow": b})
    if not able:
        with pytest.raises(ValueError, match=rf"--budget {budget}: the cheapest node costs \$"):
            affordable(costs, WORK, prices, budget)
        return
    assert {counted(costs, ranks) for ranks in affordable(costs, WORK, prices, budget)} == wanted


@only("7.0")
@pytest.mark.parametrize("budget", [3.0, 7.0, 11.0, 100.0])
def test_no_affordable_nodes_train_faster(budget: float) -> None:
    costs = costs_of(2, 3)
    prices = prices_of(costs, {"fast": 2.5, "slow": 1.0})
    found = offers(costs, WORK, prices, budget, planned)
    every = [planned(costs.of_ranks(ranks, Home())).seconds for ranks in affordable(costs, WORK, prices, budget)]
    best = found[0]
    assert best.plan.seconds <= min(every) * (1 + NEAR)
    assert best.per_hour <= budget
    assert [offer.plan.seconds for offer in found] == sorted(offer.plan.seconds for offer in found)
    best.plan.strategy.check(2, best.costs.ranks)
    tokens = 16 * 500
    million = best.per_hour * best.plan.seconds / 3600 / tokens * 1e6
    assert best.sentence(WORK).endswith(f"${million:.4g} per million tokens")


def test_a_large_market_has_few_combinations_to_compare_and_the_most_powerful_first() -> None:
    """Of ten kinds with ten nodes each, 11^10 combinations could be rented."""
    names = [f"t{i}" for i in range(10)]
    types = {name: DeviceType((2 + i) * 1e14, 10**9, 1e12) for i, name in enumerate(names)}
    cluster = Cluster.of(types, tuple(Node(name, 1, priced.FAST, priced.SLOW, count=10) for name in names))
    profiles = [priced.profile(2, name, 1 / (2 + i)) for i, name in enumerate(names)]
    costs = Costs(Profile.merge(profiles), cluster)
    prices = prices_of(costs, {name: 1.0 + i + 0.1 * i * i for i, name in enumerate(names)})
    found = affordable(costs, WORK, prices, 55.0)
    assert 1 <= len(found) <= MOST
    assert all(prices.hour(ranks) <= 55.0 for ranks in found)
    powers = [sum(2 + names.index(cluster.type_of(rank)) for rank in ranks) for ranks in found]
    assert powers == sorted(powers, reverse=True)
    assert len(set(found)) == len(found)


def test_lost_devices_are_not_rented_and_nodes_that_are_too_small_are_passed_over() -> None:
    costs = costs_of(1, 2, health=hg.Health({2: float("inf")}))
    prices = prices_of(costs, {"fast": 5.0, "slow": 1.0})
    assert affordable(costs, WORK, prices, 1.0) == [(3,)]
    small = costs_of(1, 1, memory=100_000)
    with pytest.raises(hg.Unsupported, match="nothing fits"):
        offers(small, WORK, prices_of(small, {"fast": 1.0, "slow": 1.0}), 2.0, planned)


def test_nodes_without_work_are_not_rented() -> None:
    costs = costs_of(1, 1)
    slow = hg.Health({2: 1e6})
    costs = costs.changed(health=slow)
    (found,) = offers(costs, WORK, prices_of(costs, {"fast": 5.0, "slow": 1.0}), 20.0, planned)
    assert found.devices == "2 fast"
    assert found.per_hour == pytest.approx(10.0)


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf")])
def test_a_budget_that_is_no_price_is_refused(budget: float) -> None:
    costs = costs_of(1, 1)
    with pytest.raises(ValueError, match=r"--budget .*: give dollars per hour, such as 20"):
        affordable(costs, WORK, prices_of(costs, {"fast": 1.0, "slow": 1.0}), budget)

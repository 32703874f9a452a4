import math
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.generators import device_groups
from hydragraph.planner.generators.device_groups import (
    COMBINATIONS,
    NodeDevices,
    groupings,
    nodes_of,
    power,
    regular,
    splits,
)
from hydragraph.planner.generators.group_prices import LayerPrices, site_of
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from tests.cost import priced

SECONDS = {1: 1.0, 2: 0.52, 4: 0.28}


def node(*rates: float) -> NodeDevices:
    ordered = tuple(sorted(rates, reverse=True))
    site = site_of(priced.costs(4, priced.cluster(4)), 0)
    return NodeDevices(tuple(range(len(rates))), ordered, site)


@given(st.lists(st.sampled_from([1.0, 1.5, 2.57, 5.42, 12.53]), min_size=1, max_size=5))
def test_slow_ones_in_the_small_groups_is_the_best_of_all_groupings(rates: list[float]) -> None:
    """Malleus, theorems 1 and 2: against every order of the devices and every sequence of sizes."""
    best = 0.0
    for order in set(permutations(rates)):
        for shape in _compositions(len(rates)):
            first = 0
            total = 0.0
            for size in shape:
                total += 1 / (max(order[first : first + size]) * SECONDS[size])
                first += size
            best = max(best, total)
    here = node(*rates)
    assert max(power(here, shape, SECONDS) for shape in splits(len(rates), (1, 2, 4))) == pytest.approx(best)


def _compositions(count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(size, *rest) for size in SECONDS if size <= count for rest in _compositions(count - size)]


def test_the_example_of_the_module() -> None:
    here = node(5.4, *[1.0] * 7)
    assert power(here, (4, 4), SECONDS) == pytest.approx(4.2, abs=0.05)
    assert power(here, (1, 1, 2, 4), SECONDS) == pytest.approx(6.7, abs=0.05)


def test_splits_use_all_devices_and_grow() -> None:
    found = list(splits(8, (1, 2, 4)))
    assert all(sum(shape) == 8 and list(shape) == sorted(shape) for shape in found)
    assert len(found) == len(set(found)) == 9
    assert regular(7, 4, (1, 2, 4)) == (1, 2, 4)
    assert regular(6, 2, (1, 2, 4)) == (2, 2, 2)


def test_every_grouping_has_every_running_device_once_and_stays_in_its_node() -> None:
    health = Health({1: 2.57, 6: math.inf})
    costs = priced.costs(4, priced.cluster(12, per_node=6), health)
    prices = LayerPrices(costs, [100])
    nodes = nodes_of(costs)
    found = groupings(costs, prices, nodes)
    assert len(found) > 3
    for groups in found:
        devices = Counter(device for group in groups for device in group.devices)
        assert devices == Counter(rank for rank in range(12) if rank != 6)
        assert all(len({costs.cluster.node_of(d) for d in group.devices}) == 1 for group in groups)
        assert all(group.form.rate == max(health.rate(d) for d in group.devices) for group in groups)


def test_symmetric_groupings_have_one_degree() -> None:
    costs = priced.costs(4, priced.mixed())
    prices = LayerPrices(costs, [100])
    both = groupings(costs, prices, nodes_of(costs))
    symmetric = groupings(costs, prices, nodes_of(costs), symmetric=True)
    assert {tuple(sorted({g.form.tp for g in groups})) for groups in both} == {(1,), (2,), (1, 2)}
    assert {tuple(sorted({g.form.tp for g in groups})) for groups in symmetric} == {(1,), (2,)}


@pytest.mark.parametrize("types", [1, 7])
def test_many_different_nodes_have_few_groupings_and_every_degree(types: int) -> None:
    """All combinations of degrees of 16 nodes would be millions."""
    names = ("fast", "slow", "odd", "a", "b", "c", "d")[:types]
    links = (Interconnect(1e9 + i, 1e-6) for i in range(16))
    nodes = [Node(names[i % types], 2, link, link) for i, link in enumerate(links)]
    cluster = Cluster.of(dict.fromkeys(names, DeviceType(1e15, 10**9, 1e12)), tuple(nodes))
    costs = Costs(Profile.merge([priced.profile(4, name) for name in names]), cluster)
    found = groupings(costs, LayerPrices(costs, [100]), nodes_of(costs))
    assert len(found) <= COMBINATIONS
    degrees = {tuple({group.form.site.type: group.form.tp for group in groups}.values()) for groups in found}
    assert (1,) * types in degrees
    assert (2,) * types in degrees
    assert all(any(each[i] == tp for each in degrees) for i in range(types) for tp in (1, 2))


def test_types_share_degrees_if_all_combinations_of_nodes_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_groups, "COMBINATIONS", 4)
    able = {
        site_of(priced.costs(4, priced.cluster(4)), 0)._replace(type=name, cards=cards): (1, 2, 4)[: 3 - (cards > 1)]
        for name in "ab"
        for cards in (1.0, 2.0)
    }
    found = [tuple(choice.values()) for choice in device_groups._degrees(able)]
    assert {(1, 1, 1, 1), (2, 2, 2, 2), (4, 2, 4, 2), (4, 2, 1, 1), (1, 1, 4, 2)} <= set(found)
    assert (1, 2, 1, 1) not in found


def test_a_device_that_no_group_takes_stays_idle() -> None:
    """With one tensor-parallel degree, as in deterministic runs, groups may not use all devices of a node."""
    costs = priced.costs(4, priced.cluster(3), Health({1: 2.57}))
    pairs = costs.changed(profile=costs.profile.of_cut(*next(cut for cut in costs.profile.cuts if cut[0] == 2)))
    found = groupings(pairs, LayerPrices(pairs, [100]), nodes_of(pairs))
    assert [[group.form.tp for group in groups] for groups in found] == [[2]]

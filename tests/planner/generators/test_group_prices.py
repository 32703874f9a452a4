import pytest

from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.planner.generators.group_prices import LayerPrices, free_bytes, site_of, state_bytes
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.health import Health
from tests.cost import priced


def test_owners_within_a_node_are_the_part_of_all_ranks_that_its_largest_node_has() -> None:
    types = {name: DeviceType(1e15, 10**9, 1e12) for name in ("fast", "slow")}
    nodes = tuple(Node(name, n, priced.FAST, priced.SLOW, cards=n) for name, n in (("fast", 3), ("slow", 1)))
    costs = priced.costs(4, Cluster.of(types, nodes))
    prices = LayerPrices(costs, [700])
    assert prices.within(site_of(costs, 0)) == pytest.approx(3 / 4)
    assert prices.within(site_of(costs, 3)) == pytest.approx(1 / 4)


def test_the_state_by_memory_and_the_mini_batch_are_not_free() -> None:
    costs = priced.costs(4, priced.cluster(4), Health({2: float("inf")}))
    free = free_bytes(costs, 700, 0.9)
    assert set(free) == {0, 1, 3}
    kept = sum(0.9 * costs.memory_of(rank) - size for rank, size in free.items())
    assert kept == pytest.approx(state_bytes(costs) + 3 * batch_bytes(700, 700))
    assert batch_bytes(700, 1400) == 8 * (3 * 700 + 1400)

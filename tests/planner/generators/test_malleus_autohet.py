import math
from itertools import pairwise

import pytest

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.generators.malleus_autohet import MIXED, fits, search, sizes_of
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.health import Health
from tests.cost import priced


def test_micro_batches_grow_by_doubling_up_to_the_sequences() -> None:
    costs = priced.costs(6, priced.mixed())
    assert sizes_of(costs, 20, 700) == ([1, 2, 4, 8, 16], 4)
    assert sizes_of(costs, 3, 700) == ([1, 2], 4)
    assert sizes_of(costs, 1, 700)[0] == [1]


@pytest.mark.parametrize(("sequences", "together"), [(4, 1), (16, 4), (64, 16), (256, 16)])
def test_micro_batches_grow_as_long_as_that_gains(sequences: int, together: int) -> None:
    """Longer micro-batches pay the fixed cost less often, up to one micro-batch for each of four ranks."""
    found = search(priced.costs(6, priced.cluster(4, 1)), sequences, 10, MIXED)
    assert found[0].together == together
    assert all(a.seconds <= b.seconds for a, b in pairwise(found))


@pytest.mark.parametrize(("safety", "found"), [(1.0, False), (100.0, True)])
def test_more_memory_makes_room(safety: float, found: bool) -> None:
    costs = priced.costs(6, priced.cluster(2), elements=8_000_000)
    assert fits(costs, 4, 700, safety) is found


@pytest.mark.parametrize(("layers", "sequences", "weak"), [(6, 8, 30.0), (8, 16, 20.0), (5, 12, 60.0)])
def test_weak_devices_make_no_plan_worse(layers: int, sequences: int, weak: float) -> None:
    nodes = (Node("fast", 4, priced.FAST, priced.SLOW), Node("slow", 2, priced.SLOW, priced.SLOW))
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(1e15 / weak, 10**9, 1e12)}
    profile = Profile.merge([priced.profile(layers, "fast"), priced.profile(layers, "slow", weak)])
    costs = Costs(profile, Cluster.of(types, nodes))
    best = search(costs, sequences, 700, MIXED)[0].seconds
    without = costs.changed(health=Health(dict.fromkeys(range(4, costs.ranks), math.inf)))
    alone = search(without, sequences, 700, MIXED)[0].seconds
    assert best <= alone * 1.001

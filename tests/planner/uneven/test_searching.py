from itertools import pairwise

import pytest

from hydragraph.planner.uneven.searching import MIXED, fits, search, sizes_of
from hydragraph.spec.cluster import Interconnect
from tests.cost import priced


def test_micro_batches_grow_by_doubling_up_to_the_sequences() -> None:
    costs = priced.costs(6, priced.mixed())
    assert sizes_of(costs, 20, 700) == ([1, 2, 4, 8, 16], 4)
    assert sizes_of(costs, 3, 700) == ([1, 2], 4)
    assert sizes_of(costs, 1, 700)[0] == [1]


def test_larger_micro_batches_hide_traffic_that_smaller_ones_do_not() -> None:
    """Over a slow network the first forward of few tokens hides little of pull and push."""
    slow, quick = (
        search(priced.costs(6, priced.cluster(4, 1, outer=link), elements=100_000), 16, 100, MIXED)
        for link in (Interconnect(1e7, 1e-6), Interconnect(1e13, 0.0))
    )
    assert slow[0].together > quick[0].together
    # The candidates come in order, and each says how many sequences it takes together.
    assert all(a.seconds <= b.seconds for a, b in pairwise(slow))
    assert {each.together for each in slow} <= {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("safety", "found"), [(1.0, False), (100.0, True)])
def test_more_memory_makes_room(safety: float, found: bool) -> None:
    costs = priced.costs(6, priced.cluster(2), elements=5_000_000)
    assert fits(costs, 4, 700, safety) is found

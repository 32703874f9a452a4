from itertools import pairwise

import pytest

from hydragraph.planner.uneven.searching import MIXED, fits, search, sizes_of
from tests.cost import priced


def test_micro_batches_grow_by_doubling_up_to_the_sequences() -> None:
    costs = priced.costs(6, priced.mixed())
    assert sizes_of(costs, 20, 700) == ([1, 2, 4, 8, 16], 4)
    assert sizes_of(costs, 3, 700) == ([1, 2], 4)
    assert sizes_of(costs, 1, 700)[0] == [1]


@pytest.mark.parametrize(("sequences", "together"), [(4, 1), (16, 4), (64, 16), (256, 16)])
def test_micro_batches_grow_as_long_as_that_gains(sequences: int, together: int) -> None:
    """What a micro-batch costs beside its tokens is then paid less often, up to all that each of four ranks gets."""
    found = search(priced.costs(6, priced.cluster(4, 1)), sequences, 10, MIXED)
    assert found[0].together == together
    assert all(a.seconds <= b.seconds for a, b in pairwise(found))


@pytest.mark.parametrize(("safety", "found"), [(1.0, False), (100.0, True)])
def test_more_memory_makes_room(safety: float, found: bool) -> None:
    costs = priced.costs(6, priced.cluster(2), elements=8_000_000)
    assert fits(costs, 4, 700, safety) is found

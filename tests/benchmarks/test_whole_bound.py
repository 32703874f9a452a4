import pytest

from benchmarks.published.whole_bound import Relaxed, whole_bound
from hydragraph.planner.iteration_bound import bound
from tests.planner.exhaustive import SEQUENCES, above, best_seconds, costs_of
from tests.planner.promises import LENGTH

CLUSTERS = [(2, 0, 2, {}), (2, 1, 3, {}), (3, 0, 4, {0: 2.57})]


@pytest.mark.parametrize(("fast", "slow", "layers", "rates"), CLUSTERS)
def test_no_plan_of_all_is_quicker_and_the_simple_bound_is_no_nearer(
    fast: int, slow: int, layers: int, rates: dict[int, float]
) -> None:
    costs = costs_of(fast, slow, layers, rates)
    best = best_seconds(costs, SEQUENCES)
    found = whole_bound(costs, SEQUENCES, LENGTH, (1,))
    assert bound(costs, [[LENGTH] * SEQUENCES]) <= found <= best * (1 + 1e-9)
    # Relaxing never increases the bound; a plan's own seconds end the search.
    assert whole_bound(costs, SEQUENCES, LENGTH, (1,), Relaxed(layers=True)) <= found * 1.003
    assert whole_bound(costs, SEQUENCES, LENGTH, (1,), below_s=best) == pytest.approx(found, rel=0.005)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", range(1, 6))
def test_the_bound_holds_of_all_small_clusters(devices: int) -> None:
    for fast in range(devices + 1):
        for layers in (1, 2, 3, 5):
            for rates in ({}, {0: 2.57}):
                if len(rates) < devices or not rates:
                    costs = costs_of(fast, devices - fast, layers, rates)
                    best = best_seconds(costs, SEQUENCES)
                    assert whole_bound(costs, SEQUENCES, LENGTH, (1,)) <= best * (1 + 1e-9)
                    assert above(costs) <= 0.02

import math
import time

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.price_candidate import PricedPlan, Shortage
from hydragraph.planner.price_mini_batches import MiniBatchPrices, settle_best
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from tests.cost import priced
from tests.planner.promises import profile_of
from tests.thorough import first

BATCHES = [[3000, *[200] * 12], [400] * 20, [16, 700]]
STRATEGIES = ("4*<tp1,pp1>", "2*<tp2,pp1>", "<[0,1]x6> + <[2]x6> + <[3]x6>", "<[0,1]x3,[2,3]x3>", "<[0]x6> + <[2,3]x6>")


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("rates", first([{3: 5.42}], [{}, {3: 5.42}]), ids=str)
def test_estimates_are_near_simulations(text: str, rates: dict[int, float]) -> None:
    costs = priced.costs(6, priced.mixed(), hg.Health(rates), elements=300_000)
    strategy = hg.Strategy.parse(text, 6)
    settled = MiniBatchPrices(costs, BATCHES).settle(strategy, "test")
    assert isinstance(settled, PricedPlan)
    assert settled.simulated
    owned = costs.changed(home=settled.home)
    for assignment, seconds in zip(settled.assignments, settled.by_batch, strict=True):
        assert owned.simulate(strategy, assignment).seconds == seconds
    # Quick assignments may be worse than those of the planner, hardly better.
    estimated = MiniBatchPrices(costs, BATCHES).by_batch(strategy)
    assert all(0.95 * b <= a <= 1.2 * b for a, b in zip(estimated, settled.by_batch, strict=True))


def test_what_takes_no_longest_sequence_takes_infinitely_long_for_it() -> None:
    nodes = (Node("fast", 2, priced.FAST, priced.SLOW, cards=2),)
    costs = priced.costs(6, Cluster.of({"fast": DeviceType(1e15, 60_000_000, 1e12)}, nodes))
    small = hg.Strategy.parse("2*<tp1,pp1>", 6)
    longest = max(p.max_len for p in costs.pipelines(small)) + 1
    varied = MiniBatchPrices(costs, [[longest], [16] * 4])
    for found in (varied.by_batch(small), varied.settle(small, "test").by_batch):
        assert found[0] == math.inf
        assert math.isfinite(found[1])


def test_the_best_by_estimate_are_settled_until_enough_fit() -> None:
    costs = priced.costs(6, priced.mixed())
    origins = {hg.Strategy.parse(text, 6): "test" for text in STRATEGIES}
    known: dict[hg.Strategy, PricedPlan | Shortage] = {}
    varied = MiniBatchPrices(costs, BATCHES)
    settle_best(varied, origins, None, known, most=2)
    assert set(known) == set(sorted(origins, key=varied.seconds)[:2])
    hurried: dict[hg.Strategy, PricedPlan | Shortage] = {}
    settle_best(MiniBatchPrices(costs, BATCHES), origins, time.monotonic() - 1, hurried)
    assert list(hurried) == [next(iter(origins))]
    (only,) = hurried.values()
    assert isinstance(only, PricedPlan)
    assert not only.simulated
    exact = known.get(only.strategy) or varied.settle(only.strategy, "test")
    assert isinstance(exact, PricedPlan)
    assert only.assignments == exact.assignments
    assert 0.95 * exact.seconds <= only.seconds <= 1.05 * exact.seconds
    # A result of another search method is then also enough.
    others = {hg.Strategy.parse("2*<tp1,pp2>", 6): "another"}
    settle_best(MiniBatchPrices(costs, BATCHES), others, time.monotonic() - 1, hurried)
    assert list(hurried) == [next(iter(origins))]


def test_owners_that_are_given_stay() -> None:
    costs = priced.costs(6, priced.mixed())
    home = hg.Home(shares=(1, 0.5, 0, 1))
    settled = MiniBatchPrices(costs, BATCHES).settle(hg.Strategy.parse("2*<tp2,pp1>", 6), "test", home)
    assert isinstance(settled, PricedPlan)
    assert settled.home == home


@pytest.mark.parametrize("text", ["<[0]x1>", "2*<tp1,pp1>", "<tp2,pp1>"])
def test_memory_is_that_of_the_mini_batches_as_assigned_and_fits(text: str) -> None:
    # The labels of all sequences take a tenth of a device, which MaxLen does not include.
    nodes = (Node("fast", 2, priced.FAST, priced.SLOW, cards=2),)
    cluster = Cluster.of({"fast": DeviceType(1e15, 20_000_000, 1e12)}, nodes)
    costs = Costs(profile_of(1, "fast", (1, 2), recompute=False, ends=1.0), cluster)
    strategy = hg.Strategy.parse(text, 1)
    settled = MiniBatchPrices(costs, [[700] * 60, [3000, 3000, *[16] * 40]]).settle(strategy, "test")
    assert isinstance(settled, PricedPlan)
    owned = costs.changed(home=settled.home)
    walked = [owned.memory(strategy, assignment) for assignment in settled.assignments]
    for rank, told in enumerate(settled.memory):
        most = max(each[rank].total for each in walked)
        assert 0.999 * most <= told <= costs.memory_of(rank)
        assert told <= 1.1 * most

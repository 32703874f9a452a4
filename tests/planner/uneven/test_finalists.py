import time

import hydragraph as hg
from hydragraph.planner.uneven.finalists import finalists, proposals
from hydragraph.planner.uneven.searching import TOGETHER, search
from hydragraph.planner.uneven.simple import simple
from tests.cost import priced

LENGTHS = [700] * 12


def test_the_best_is_simulated_and_what_was_passed_ends_later() -> None:
    costs = priced.costs(6, priced.mixed(), hg.Health({1: 2.57}))
    found = proposals(costs, LENGTHS, search(costs, 12, 700, TOGETHER), [], simple(costs, 12, 700, [1, 2]))
    last = finalists(costs, found, 0.0, None)
    best = min(each.seconds for each in last.settled)
    assert all(each.simulated for each in last.settled)
    for each in last.passed:
        assert costs.simulate(each.strategy, each.assignment).seconds >= best * 0.99
    assert {each.strategy for each in last.passed}.isdisjoint(each.strategy for each in last.settled)


def test_a_plan_is_there_however_late_it_is() -> None:
    costs = priced.costs(6, priced.mixed())
    found = proposals(costs, LENGTHS, [], [], simple(costs, 12, 700, [1]))
    last = finalists(costs, found, 0.0, time.monotonic() - 1)
    assert len(last.settled) == 1
    assert not last.settled[0].simulated

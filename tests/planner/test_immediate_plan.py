import math

import pytest

import hydragraph as hg
from hydragraph.planner.immediate_plan import _near, plan_at_once, sample
from hydragraph.planner.plan import plan
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from hydragraph.spec.training_workload import Workload
from tests.cost import priced
from tests.thorough import first, thorough

WORKLOAD = Workload(lengths=[[3000, *[200] * 12], [400] * 20, [16, 700]])
FIRST = hg.Strategy.parse("2*<tp1,pp1> + <[2,3]x6>", 6)
SOON = 0.1


@thorough
@pytest.mark.parametrize(
    "rates", first([{3: 5.42}, {0: math.inf}], [{}, {3: 5.42}, {0: 2.57, 1: 12.53}, {0: math.inf}])
)
def test_it_takes_the_longest_sequence_and_is_near_a_plan_that_was_searched_to_the_end(rates: dict[int, float]) -> None:
    costs = priced.costs(6, priced.mixed(), hg.Health(rates), elements=300_000)
    found = plan_at_once(costs, WORKLOAD, (FIRST,), SOON)
    assert found is not None
    assert found.pipelines == costs.pipelines(found.strategy)
    assert max(p.max_len for p in found.pipelines) >= WORKLOAD.longest
    assert not set(found.strategy.devices) & set(hg.Health(rates).lost)
    assert sorted(found.assignment.lengths) == sorted(sample(WORKLOAD))
    assert found.seconds == pytest.approx(costs.simulate(found.strategy, found.assignment).seconds, rel=0.1)
    assert found.seconds == pytest.approx(found.assignment.seconds + found.charge)
    best = plan(costs, Workload(lengths=[sample(WORKLOAD)]), deadline_s=None)
    assert found.seconds <= 1.3 * best.seconds


def test_what_ran_with_ranks_that_are_lost_goes_on_without_them() -> None:
    costs = priced.costs(6, priced.mixed(), elements=300_000)
    ran = hg.Strategy.parse("<[0]x6> + <[4]x6> + <[1]x3,[2]x3>", 6)  # there are ranks 0 to 3 now
    found = plan_at_once(costs, WORKLOAD, (ran,), 0.0)
    assert found is not None
    assert set(found.strategy.devices) <= {0, 1, 2, 3}
    near = _near(costs, WORKLOAD, (ran,))
    assert hg.Strategy.parse("<[0]x6> + <[1]x3,[2]x3>", 6) in near
    assert _near(costs, WORKLOAD, (ran, FIRST))[0] == FIRST


def test_without_time_what_runs_goes_on_without_the_pipelines_of_slow_ranks() -> None:
    costs = priced.costs(6, priced.mixed(), hg.Health({3: math.inf, 1: 50.0}), elements=300_000)
    found = plan_at_once(costs, WORKLOAD, (FIRST,), 0.0)
    assert found is not None
    alone = hg.Strategy.parse("<[0]x6>", 6)
    assert found.seconds <= costs.simulate(alone, hg.Assignment.even([1], sum(sample(WORKLOAD)))).seconds * 1.5


def test_nothing_fits_where_no_pipeline_holds_the_longest_sequence() -> None:
    nodes = (Node("fast", 2, priced.FAST, priced.SLOW, cards=2),)
    costs = priced.costs(6, Cluster.of({"fast": DeviceType(1e15, 60_000_000, 1e12)}, nodes))
    longest = max(p.max_len for p in costs.pipelines(hg.Strategy.parse("<tp2,pp1>", 6)))
    short = Workload(lengths=[[16] * 4])
    assert plan_at_once(costs, short, (), SOON) is not None
    assert plan_at_once(costs, Workload(lengths=[[100 * longest], [16] * 4]), (), SOON) is None


def test_the_sample_is_the_mini_batch_in_the_middle() -> None:
    assert sample(WORKLOAD) == (400,) * 20

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.price_candidate import share_out
from hydragraph.spec.cluster import Interconnect
from tests.cost import priced


def test_the_example_of_the_module() -> None:
    found = {plan.strategy for plan in simple(priced.costs(6, priced.mixed()), 8, 700, [1, 2])}
    assert hg.Strategy.parse("<[0]x3,[2]x3> + <[1]x3,[3]x3>", 6) in found


def test_those_of_the_quickest_node_of_each_kind_are_there_where_asked_for() -> None:
    costs = priced.costs(6, priced.mixed(), hg.Health({1: 2.57}))
    usual, found = ({p.strategy: p.seconds for p in simple(costs, 8, 700, [1], apart=apart)} for apart in (False, True))
    assert usual.items() <= found.items()
    more = set(found) - set(usual)
    assert hg.Strategy.parse("<[2]x6> + <[3]x6>", 6) in more
    assert all(len({costs.cluster.node_of(rank) for rank in strategy.devices}) == 1 for strategy in more)
    alike = priced.costs(6, priced.cluster(4, 2), hg.Health({0: 2.57}))
    usual, found = ({p.strategy: p.seconds for p in simple(alike, 8, 700, [1], apart=apart)} for apart in (False, True))
    assert {rank for strategy in set(found) - set(usual) for rank in strategy.devices} == {2, 3}, (
        "the node that is well"
    )


@pytest.mark.parametrize("ranks", [4, 6])
def test_what_is_kept_ends_first_of_all_simple_plans(ranks: int) -> None:
    costs = priced.costs(6, priced.cluster(ranks, 2))
    best = min(plan.seconds for plan in simple(costs, 12, 700, [1, 2, 4]))
    for tp in (1, 2):
        groups = [tuple(range(i, i + tp)) for i in range(0, ranks, tp)]
        for depth in (d for d in range(1, len(groups) + 1) if len(groups) % d == 0):
            cuts = [6 * (s + 1) // depth - 6 * s // depth for s in range(depth)]
            pipelines = [groups[i : i + depth] for i in range(0, len(groups), depth)]
            strategy = hg.Strategy(
                tuple(hg.Pipeline(tuple(hg.Stage(g, n) for g, n in zip(row, cuts, strict=True))) for row in pipelines)
            )
            # The recurrence also includes messages between stages.
            assert best <= share_out(costs, strategy, [700] * 12, 1)[1] * (1 + 1e-6)


def test_nodes_that_do_not_come_out_even_have_no_such_degree() -> None:
    costs = priced.costs(6, priced.cluster(6, 3))
    pipelines = [pipeline for plan in simple(costs, 8, 700, [1]) for pipeline in plan.strategy.pipelines]
    assert {stage.tp for pipeline in pipelines for stage in pipeline.stages} == {1}


def test_what_does_not_fit_is_left_out() -> None:
    costs: Costs = priced.costs(6, priced.cluster(2), elements=10**9)
    assert simple(costs, 8, 700, [1]) == []


def test_a_model_too_small_for_its_traffic_stays_on_the_quickest_device() -> None:
    """Messages take a second each here: whoever shares the state with another rank waits for several of them."""
    where = priced.cluster(4, 1, outer=Interconnect(1e9, 1.0))
    costs = priced.costs(2, where, hg.Health({0: 1.5}))
    found = hg.plan(costs, hg.Workload(sequences=2, length=16), "mixed")
    assert found.strategy == hg.Strategy.parse("<[1]x2>", 2)
    assert found.seconds < 1.0

from __future__ import annotations

import math

import pytest

from hydragraph.planner import metis
from hydragraph.planner.metis import Cluster, DeviceType, Measurement, Problem, Profile
from hydragraph.planner.metis.exact_optimum import optimum
from tests.planner.metis import literal
from tests.thorough import first, thorough


def check(problem: Problem, mixed_tp: bool, groups: str) -> bool:
    """Compare with the least of all plans; return whether there is one."""
    plans = literal.every_plan(problem, mixed_tp=mixed_tp, metis_groups=groups == "metis")
    expected = min((literal.price(plan) for plan in plans), default=math.inf)
    arguments = (problem.profile, problem.cluster, problem.layers, problem.batch, "exact")
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no plan"):
            metis.search(*arguments, mixed_tp=mixed_tp, groups=groups)  # pyrefly: ignore[bad-argument-type]
        return False
    found = metis.search(*arguments, mixed_tp=mixed_tp, groups=groups)  # pyrefly: ignore[bad-argument-type]
    assert found.cost == pytest.approx(expected, rel=1e-9)
    assert metis.cost(found) == found.cost
    assert literal.can_train(found)
    return True


@thorough
@pytest.mark.parametrize("seeds", first([range(12)], [range(12), range(12, 400)]))
def test_nothing_costs_less(seeds: range) -> None:
    """Up to 6 devices of up to 3 types in uneven nodes, up to 6 layers, equal and different ones, little memory."""
    plans = [
        check(literal.draw(seed, types=3), mixed_tp, groups)
        for seed in seeds
        for mixed_tp, groups in ((False, "all"), (True, "all"), (False, "metis"))
    ]
    assert sum(plans) > len(seeds)
    assert not all(plans)


def test_it_costs_no_more_than_what_the_searches_find() -> None:
    compared = 0
    for seed in range(40):
        problem = literal.draw(seed, most_devices=24, most_layers=16, types=3, batch=16, tight=False)
        if problem.cluster.devices not in (4, 8, 12, 14, 16):  # of others Metis has few divisions or none
            continue
        arguments = (problem.profile, problem.cluster, problem.layers, problem.batch)
        exact = metis.search(*arguments, "exact")
        own = metis.search(*arguments, "exact", groups="metis")
        walked = metis.search(*arguments, "naive", mixed_tp=False)
        rounding = 1 + 1e-12
        assert exact.cost <= own.cost * rounding
        # The searches count memory in their own way, so where it is short they may come to what does not fit here.
        assert own.cost <= walked.cost * rounding
        compared += 1
    assert compared > 4


def test_the_example_of_the_module() -> None:
    times = {(1, 1): (4.0, 4.0), (2, 1): (1.75, 1.75)}
    measured = {("one", *key): Measurement(row, sum(row), (0.0, 0.0)) for key, row in times.items()}
    profile = Profile(measured, (0.0, 0.0, 0.0), 0.0, 0.0, 0, 0, 0)
    problem = Problem(profile, Cluster({"one": DeviceType(1, 1)}, (("one", 2),)), 4, 4)
    best = optimum(problem, mixed_tp=False)
    assert best is not None
    assert (best.cost, best.batches, best.rows.tolist()) == (14.0, 4, [[2, 0], [1, 0], [2, 0], [0, 2]])

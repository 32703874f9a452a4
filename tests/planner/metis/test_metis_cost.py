from __future__ import annotations

import math
from itertools import islice

import pytest

from hydragraph.planner import metis
from hydragraph.planner.metis import Cluster, DeviceType, Measurement, Plan, Problem, Profile
from tests.planner.metis import literal


def test_thousands_of_metis_own_plans_cost_what_the_formulas_say() -> None:
    """Of its search: with stages of several types, without layers, and with layers that are in none."""
    seen = 0
    faulty = 0
    for seed in range(15):
        problem = literal.draw(seed, most_devices=8, most_layers=6, types=3)
        for plan, _ in literal.walk(problem, memory_aware=False).plans:
            expected = literal.price(plan)
            if math.isinf(expected):
                continue
            assert metis.cost(plan) == pytest.approx(expected, rel=1e-9), plan
            seen += 1
            faulty += not literal.can_train(plan)
    assert seen > 1000
    assert 100 < faulty < seen


def test_all_plans_of_small_problems_cost_what_the_formulas_say() -> None:
    seen = 0
    for seed in range(12):
        problem = literal.draw(seed, most_devices=5, most_layers=4, types=3)
        for plan in islice(literal.every_plan(problem, mixed_tp=True), 300):
            assert metis.cost(plan) == pytest.approx(literal.price(plan), rel=1e-9), plan
            seen += 1
    assert seen > 1000


def plain(times: dict[tuple[int, int], tuple[float, ...]], memory: float = 0.0) -> Profile:
    """Return a profile of one type of device by (tp, size), without anything but its layers."""
    measured = {("one", *key): Measurement(row, sum(row), (memory,) * len(row)) for key, row in times.items()}
    return Profile(measured, (0.0, 0.0, 0.0), 0.0, 0.0, 0, 0, 0)


def test_the_example_of_the_module() -> None:
    cluster = Cluster({"one": DeviceType(1, 1)}, (("one", 2),))
    problem = Problem(plain({(1, 1): (3.0, 5.0)}), cluster, 4, 1)
    plan = Plan(("one",), (1, 1), ((1, 1), (1, 1)), 4, (1, 1), problem)
    assert metis.cost(plan) == 23.0
    assert metis.parts(plan) == {
        "execution": 23.0, "sync": 0.0, "optimizer": 0.0, "gradients": 0.0, "activations": 0.0, "generator": 0.0
    }  # fmt: skip


def test_what_was_not_measured_is_refused() -> None:
    cluster = Cluster({"one": DeviceType(1, 1)}, (("one", 2),))
    problem = Problem(plain({(1, 1): (3.0, 5.0)}), cluster, 4, 2)
    for batches, degrees in ((2, ((1, 1), (1, 1))), (8, ((1, 1), (1, 1)))):
        with pytest.raises(ValueError, match="has no entry for a stage's micro-batch size or degree"):
            metis.cost(Plan(("one",), (1, 1), degrees, batches, (1, 1), problem))
    with pytest.raises(ValueError, match="has tp 2: use degrees up to 1"):
        metis.cost(Plan(("one",), (2,), ((1, 2),), 4, (2,), problem))

from __future__ import annotations

import math

import numpy as np
import pytest

from hydragraph.planner import metis
from hydragraph.planner.metis import metis_walk
from hydragraph.planner.metis.metis_walk import PIECES
from tests.planner.metis import literal
from tests.thorough import only, thorough
from tests.uncompiled import uncompiled


@only("naive")
@pytest.mark.parametrize("order", ["naive", "memory"])
def test_a_walk_takes_the_steps_and_finds_the_plans_of_the_literal_one(order: metis.Order) -> None:
    found = 0
    for seed in range(12):
        problem = literal.draw(seed, most_devices=8, most_layers=6, types=3)
        expected = literal.walk(problem, order == "memory")
        sound = [literal.price(plan) for plan, _ in expected.plans if literal.can_train(plan)]
        if not math.isfinite(min(sound, default=math.inf)):
            with pytest.raises(ValueError, match="no plan"):
                metis.search(problem.profile, problem.cluster, problem.layers, problem.batch, order)
            continue
        best = metis.search(problem.profile, problem.cluster, problem.layers, problem.batch, order)
        assert best.steps == expected.steps, seed
        assert best.cost == pytest.approx(min(sound), rel=1e-9)
        assert best.claimed == pytest.approx(min(cost for _, cost in expected.plans), rel=1e-9)
        assert literal.can_train(best)
        found += 1
    assert found > 7


@thorough
def test_memory_changes_what_the_orders_do() -> None:
    """Or else the tests above would not tell one order from the other."""
    steps = []
    for seed in range(25):
        problem = literal.draw(seed, most_devices=8, most_layers=6, types=3)
        steps.append([literal.walk(problem, aware).steps for aware in (False, True)])
    assert sum(naive != aware for naive, aware in steps) > 1


def test_layers_are_divided_as_by_the_literal_balancer() -> None:
    random = np.random.default_rng(5)
    lost = 0
    for _ in range(400):
        layers = int(random.integers(2, 14))
        stages = int(random.integers(1, 8))
        speed = random.uniform(0, 1, stages) ** float(random.uniform(0.2, 4))
        speed /= speed.sum() * float(random.uniform(0.8, 1.2))
        times = random.uniform(0.2, 3, layers) if random.random() < 0.5 else np.ones(layers)
        share = times / times.sum()
        bounds = np.zeros(stages + 1, dtype=np.int64)
        with uncompiled(metis_walk):
            metis_walk.partition(share, np.repeat(share / PIECES, PIECES), speed, bounds)
        assert bounds.tolist() == literal.divided(share.tolist(), speed.tolist())
        lost += bounds[-1] < layers
    assert lost > 10  # so Metis has it


def test_the_layers_go_where_speed_is() -> None:
    share = np.full(10, 0.1)
    bounds = np.zeros(3, dtype=np.int64)
    with uncompiled(metis_walk):
        metis_walk.partition(share, np.repeat(share / PIECES, PIECES), np.array([0.2, 0.8]), bounds)
    assert bounds.tolist() == [0, 2, 10]

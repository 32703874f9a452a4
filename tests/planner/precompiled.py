"""What numba compiles of planning, before tests begin: python -m tests.planner.precompiled devices, and ... metis

Once per installation. The suite's workers, and the processes that tests start, would else all compile it at once.
"""

from __future__ import annotations

import sys
from typing import get_args

import hydragraph as hg
import tests.conftest  # noqa: F401  names the folder of what numba compiles, so before numba is imported
from benchmarks.published.whole_bound import whole_bound
from hydragraph.planner import metis
from hydragraph.planner.plan import Method
from tests.cost import priced
from tests.planner.instances import broken, draw
from tests.planner.metis.test_metis_search import CLUSTER, made_up
from tests.planner.promises import LENGTH

SEQUENCES = 8
INSTANCES = 20  # enough to call every function that plans a mini-batch


def devices() -> None:
    """Plan something small for uneven devices, in every way."""
    costs = priced.costs(6, priced.mixed(), hg.Health({1: 2.57}))
    for workload in (hg.Workload(SEQUENCES, LENGTH), hg.Workload(lengths=[[LENGTH, *[LENGTH // 4] * SEQUENCES]])):
        plans = [hg.plan(costs, workload, method=method) for method in get_args(Method)]
        hg.plan(costs, workload, running=plans[0].strategy, deadline_s=0.1)
    whole_bound(costs, SEQUENCES, LENGTH, (1,))
    for seed in range(INSTANCES):
        broken(draw(seed))


def as_metis_does() -> None:
    """Search for something small by Metis's walk, and for the optimum."""
    for order in ("naive", "exact"):
        metis.search(made_up(), CLUSTER, 6, 16, order)


if __name__ == "__main__":
    {"devices": devices, "metis": as_metis_does}[sys.argv[1]]()

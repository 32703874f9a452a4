from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydragraph.planner.metis import Cluster, DeviceType, Plan, Problem
from tests.planner.metis.literal import draw


def test_tables_hold_what_was_measured() -> None:
    problem = draw(3, types=3)
    tables = problem.tables
    for (kind, tp, size), measured in problem.profile.measurements.items():
        if kind not in problem.types:
            continue
        at = (problem.types.index(kind), tp.bit_length() - 1, tables.size_at[size])
        assert tables.known[at]
        np.testing.assert_allclose(np.diff(tables.upto[at]), measured.layers_ms)
        np.testing.assert_array_equal(tables.memory[at], measured.memory_mb)
        np.testing.assert_allclose(tables.sync[at], measured.sync_ms)
    assert tables.share.sum() == pytest.approx(1)


def test_ranks_follow_the_order_of_types() -> None:
    problem = next(each for each in (draw(seed, types=3) for seed in range(9)) if "slow" in each.types)
    nodes = Cluster({"fast": DeviceType(1, 1), "slow": DeviceType(1, 1)}, (("slow", 2), ("fast", 1), ("slow", 1)))
    problem = replace(problem, cluster=nodes)
    assert problem.types == ("slow", "fast")
    assert problem.kinds(("fast", "slow")).tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="name each of"):
        problem.kinds(("fast",))


def test_a_plan_knows_the_first_layer_of_each_stage() -> None:
    nodes = Cluster({"fast": DeviceType(1, 1)}, (("fast", 4),))
    profile = draw(0).profile
    plan = Plan(("fast",), (2, 2), ((1, 2), (2, 1)), 2, (1, profile.layers - 1), Problem(profile, nodes, 8, 4))
    assert plan.partition == (0, 1, profile.layers)


def test_sequences_that_do_not_come_out_even_are_counted() -> None:
    nodes = Cluster({"fast": DeviceType(1, 1)}, (("fast", 4),))
    profile = draw(0).profile
    for batch, lost in ((8, 0), (6, 2)):
        plan = Plan(("fast",), (4,), ((4, 1),), 1, (profile.layers,), Problem(profile, nodes, batch, 4))
        assert plan.lost_sequences == lost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degrees": ((1, 1), (2, 1))}, "must equal its number of ranks"),
        ({"groups": (2,)}, "equally many groups, degrees and layers"),
        ({"groups": (2, 4), "degrees": ((1, 2), (4, 1))}, "use at most the cluster's 4 ranks, not 6"),
        ({"layers": (1, 99)}, "at most the model's"),
        ({"batches": 0}, "at least one micro-batch"),
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, object], message: str) -> None:
    nodes = Cluster({"fast": DeviceType(1, 1)}, (("fast", 4),))
    problem = Problem(draw(0).profile, nodes, 8, 4)
    fields: dict[str, object] = {"groups": (2, 2), "degrees": ((1, 2), (2, 1)), "batches": 2, "layers": (1, 1)}
    with pytest.raises(ValueError, match=message):
        Plan(types=("fast",), problem=problem, **(fields | change))  # pyrefly: ignore[bad-argument-type]


def test_a_type_without_a_profile_is_named() -> None:
    problem = draw(0)
    nodes = Cluster({"unknown": DeviceType(1, 1)}, (("unknown", 4),))
    with pytest.raises(ValueError, match="no profile of device type 'unknown'"):
        replace(problem, cluster=nodes)
    with pytest.raises(ValueError, match="both must be at least 1"):
        replace(problem, batch=0)

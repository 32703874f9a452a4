"""A config's `plan` gives costs for the run's ranks, or an error that names the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hydragraph.cost.costs import Costs
from hydragraph.train.config import PlanConfig
from hydragraph.train.plan_input import read_costs
from tests.cost import priced

CLUSTER = """
types:
  fast: {flops_per_s: 1e15, memory_bytes: 1e9, memory_bytes_per_s: 1e12}
  slow: {flops_per_s: 4e14, memory_bytes: 1e9, memory_bytes_per_s: 1e12}
nodes:
  - {type: fast, devices: 2, inner: {bytes_per_s: 1e12, latency_s: 0}, outer: {bytes_per_s: 1e11, latency_s: 0}}
  - {type: slow, devices: 2, inner: {bytes_per_s: 1e12, latency_s: 0}, outer: {bytes_per_s: 1e11, latency_s: 0}}
"""


@pytest.fixture
def plan(tmp_path: Path) -> PlanConfig:
    """Return one with a profile of two types, a cluster of four ranks, and one of them slow."""
    priced.costs(4, priced.mixed()).profile.save(tmp_path / "both.json")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "health.yaml").write_text("{1: 2.57}")
    files = {name: str(tmp_path / name) for name in ("both.json", "cluster.yaml", "health.yaml")}
    return PlanConfig(True, files["both.json"], files["cluster.yaml"], files["health.yaml"])


def test_costs_are_those_of_the_cluster_that_was_planned_with(plan: PlanConfig) -> None:
    found = read_costs(plan, 4)
    assert isinstance(found, Costs)
    assert list(found.cluster.types) == ["fast", "slow"]
    assert found.rate(1) == 2.57 * found.rate(0)
    assert read_costs(replace(plan, cluster=None, health=None), 3) == priced.costs(4, priced.mixed()).profile
    assert read_costs(PlanConfig(), 3) is None


def test_a_cluster_of_other_ranks_or_of_types_that_nobody_measured_is_refused(plan: PlanConfig, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"plan.cluster .*: the file has 4 devices, but the run has 3 ranks: list one device per"
    ):
        read_costs(plan, 3)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("slow", "lame"))
    with pytest.raises(ValueError, match=r"plan.cluster .*device type 'lame' was not measured"):
        read_costs(plan, 4)

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.planner import metis
from hydragraph.planner.metis import Cluster, DeviceType, Measurement, Profile
from hydragraph.spec import cluster as spec


def made_up(layers: int = 6) -> Profile:
    """Return a profile of two types: degrees help less and less, and memory grows with the micro-batch."""
    measured = {}
    for kind, factor in (("new", 1.0), ("old", 3.0)):
        for tp in (1, 2, 4, 8):
            for size in (1, 2, 4, 8, 16):
                times = (factor * (size + 0.5) / tp**0.8,) * layers
                measured[kind, tp, size] = Measurement(times, 1.1 * sum(times), (300 * size / tp,) * layers)
    return Profile(measured, (4e6, 2e6, 4e6), 3.0, 0.1, hidden=512, sequence=128, vocabulary=1000)


TYPES = {"new": DeviceType(46, 40), "old": DeviceType(50, 16)}
CLUSTER = Cluster(TYPES, (("old", 4), ("new", 4)))


def test_every_order_returns_a_plan_with_all_layers_and_devices() -> None:
    found = {order: metis.search(made_up(), CLUSTER, 6, 16, order) for order in ("naive", "memory", "exact")}
    for each in found.values():
        assert sum(each.layers) == 6
        assert sum(each.groups) == 8
        assert [dp * tp for dp, tp in each.degrees] == list(each.groups)
        assert 16 % each.batches == 0
        assert metis.cost(each) == each.cost
    assert max(tp for _, tp in found["exact"].degrees) <= 4
    assert found["exact"].claimed is None


def test_degrees_are_limited_where_asked() -> None:
    assert all(tp == 1 for _, tp in metis.search(made_up(), CLUSTER, 6, 16, "exact", max_tp=1).degrees)
    larger = metis.search(made_up(), CLUSTER, 6, 16, "exact", max_tp=8, mixed_tp=True)
    assert larger.cost <= metis.search(made_up(), CLUSTER, 6, 16, "exact").cost


def test_the_order_of_types_decides_what_metis_claims() -> None:
    """It begins with the first one, and prices plans of the others by their first stage."""
    other = replace(CLUSTER, nodes=CLUSTER.nodes[::-1])
    one, two = (metis.search(made_up(), each, 6, 16, "naive") for each in (CLUSTER, other))
    assert one.steps == two.steps
    assert one.claimed != two.claimed
    assert min(one.claimed, two.claimed) < min(one.cost, two.cost)  # pyrefly: ignore[bad-specialization]


def test_profiles_are_stretched_and_clusters_of_hydragraph_understood() -> None:
    link = spec.Interconnect(2**20 * 1000 * 46, 0.0)
    types = {"new": spec.DeviceType(1e15, 40 * 2**30, 1e12), "old": spec.DeviceType(1e14, 16 * 2**30, 1e12)}
    nodes = (spec.Node("old", 3, link, link), spec.Node("new", 2, link, link))
    found = metis.search(made_up(), hg.Cluster.of(types, nodes), 10, 16, "exact")
    assert sum(found.layers) == 10
    assert sum(found.groups) == 5


def test_what_cannot_be_searched_is_said() -> None:
    with pytest.raises(ValueError, match="'order' is 'best': use 'naive', 'memory' or 'exact'"):
        metis.search(made_up(), CLUSTER, 6, 16, "best")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="'groups' is 'all', but 'order' is"):
        metis.search(made_up(), CLUSTER, 6, 16, "naive", groups="all")
    small = Cluster({"new": DeviceType(46, 0.01)}, (("new", 4),))
    for order in ("naive", "memory", "exact"):
        with pytest.raises(ValueError, match=r"no plan for 16 sequences fits on 4 devices with 0\.04 GB in total"):
            metis.search(made_up(), small, 6, 16, order)
    seven = Cluster(TYPES, (("new", 4), ("old", 37)))
    with pytest.raises(ValueError, match="Metis cannot divide 41 devices into S <= 6 stages"):
        metis.search(made_up(), seven, 6, 16, "naive")
    assert sum(metis.search(made_up(), seven, 6, 16, "exact").groups) == 41


def test_it_needs_neither_torch_nor_a_process_group() -> None:
    program = "import sys; from hydragraph.planner import metis; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True)

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydragraph as hg
from hydragraph.planner.metis import Cluster, DeviceType
from hydragraph.spec import cluster as spec


def test_metis_own_files(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("0.0.0.2 slots=4\n0.0.0.2 slots=2\n\n0.0.0.1 slots=16\n")
    kinds = {
        "0.0.0.1": {"instance_type": "new", "inter_bandwidth": 1, "intra_bandwidth": 46, "memory": 80},
        "0.0.0.2": {"instance_type": "old", "inter_bandwidth": 1, "intra_bandwidth": 50, "memory": 16},
        "0.0.0.3": {"instance_type": "unused", "inter_bandwidth": 1, "intra_bandwidth": 50, "memory": 15},
    }
    (tmp_path / "types.json").write_text(json.dumps(kinds))
    cluster = Cluster.load(tmp_path / "hosts", tmp_path / "types.json")
    assert cluster.nodes == (("old", 4), ("old", 2), ("new", 16))
    assert cluster.counts == {"old": 6, "new": 16}
    assert list(cluster.counts) == ["old", "new"]
    assert cluster.devices == 22
    assert cluster.types["new"] == DeviceType(46, 80)
    (tmp_path / "hosts").write_text("0.0.0.9 slots=4\n")
    with pytest.raises(ValueError, match=r"names 0\.0\.0\.9"):
        Cluster.load(tmp_path / "hosts", tmp_path / "types.json")
    (tmp_path / "hosts").write_text("0.0.0.1 4\n")
    with pytest.raises(ValueError, match="is not a host"):
        Cluster.load(tmp_path / "hosts", tmp_path / "types.json")


def test_a_cluster_of_hydragraph() -> None:
    slow = spec.Interconnect(1e9, 0.0)
    fast = spec.Interconnect(2**20 * 1000 * 46, 0.0)
    types = {"new": spec.DeviceType(1e15, 80 * 2**30, 1e12), "old": spec.DeviceType(1e14, 16 * 2**30, 1e12)}
    nodes = (spec.Node("old", 3, fast, slow), spec.Node("new", 4, fast, slow), spec.Node("old", 2, fast.times(2), slow))
    cluster = Cluster.of(hg.Cluster.of(types, nodes))
    assert cluster.nodes == (("old", 3), ("new", 4), ("old", 2))
    assert cluster.types == {"old": DeviceType(46, 16), "new": DeviceType(46, 80)}
    assert Cluster.of(cluster) is cluster


def test_what_is_no_cluster_is_named() -> None:
    kinds = {"a": DeviceType(1, 1)}
    with pytest.raises(ValueError, match="no nodes"):
        Cluster(kinds, ())
    with pytest.raises(ValueError, match="unknown type 'b'"):
        Cluster(kinds, (("b", 1),))
    with pytest.raises(ValueError, match="has 0 devices"):
        Cluster(kinds, (("a", 0),))
    with pytest.raises(ValueError, match="more than 0"):
        DeviceType(0, 1)

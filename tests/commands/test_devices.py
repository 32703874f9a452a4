"""`hydragraph devices` prints what it finds, and writes a cluster file."""

from __future__ import annotations

from pathlib import Path

from hydragraph.spec.cluster import Cluster
from tests.commands.tiny import run


def test_this_machine_is_printed_and_written(tmp_path: Path) -> None:
    done = run("devices", "--ranks", "1", "--device", "cpu", "--output", tmp_path / "cluster.yaml")
    assert done.exit_code == 0, done.output
    assert "GFLOP/s" in done.stdout
    assert "hydragraph plan --cluster" in done.stdout
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    assert len(cluster.devices) == 1
    assert cluster.devices[0].flops_per_s > 0


def test_a_folder_that_is_missing_is_told_first(tmp_path: Path) -> None:
    done = run("devices", "--output", tmp_path / "none" / "cluster.yaml")
    assert done.exit_code == 2
    assert "create it, or name another" in done.stderr

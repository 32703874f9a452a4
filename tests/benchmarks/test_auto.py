"""The pairs of machines of benchmarks/auto.py, their files, and what it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

import hydragraph as hg
from benchmarks.auto import STATIC, ByHand, Pair, Ran, differences, planned, slower_than
from benchmarks.everything import Done
from hydragraph.spec.cluster import Cluster
from tests.cost import priced


def test_drawn_pairs_differ_and_are_drawn_again() -> None:
    pairs = [Pair.drawn(seed) for seed in range(20)]
    assert pairs == [Pair.drawn(seed) for seed in range(20)]
    assert len(set(pairs)) > 15
    assert all(max(pair.shares) == 0.8 and min(pair.shares) >= 0.2 for pair in pairs)
    assert {pair.shares[0] == 0.8 for pair in pairs} == {True, False}, "either machine may be the faster one"


def test_the_cluster_file_has_the_true_speeds_and_the_true_link(tmp_path: Path) -> None:
    pair = Pair(shares=(0.4, 0.8), bits_per_s=1e8)
    pair.write_cluster(tmp_path / "cluster.yaml")
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    assert [device.flops_per_s for device in cluster.devices] == [2e10, 4e10]
    assert [device.node for device in cluster.devices] == [0, 1]
    assert cluster.nodes[0].outer.bytes_per_s == pytest.approx(1.25e7)


@pytest.mark.parametrize("strategies", ["auto", [STATIC["equal pipeline"]]])
def test_the_configs_of_sides_differ_only_in_how_they_run(tmp_path: Path, strategies: object) -> None:
    plain, side = Pair().config(tmp_path, "a", 5), Pair().config(tmp_path, "b", 5, strategies=strategies)
    assert (side.data, side.model, side.optimizer, side.steps) == (plain.data, plain.model, plain.optimizer, 5)
    assert side.automatic == (strategies == "auto")


def test_losses_and_seconds_of_runs() -> None:
    def ran(*losses: float) -> Ran:
        return Ran({i: Done(loss, 5, 10.0 * i) for i, loss in enumerate(losses, start=1)}, 3.0, (), (), ())

    one = ran(4.0, 2.0, 1.0)
    assert (one.startup_s, one.step_s, one.later_s) == (7.0, 10.0, 10.0)
    assert differences({"auto": [one], "other": [ran(4.0, 2.0, 1.001)]}) == pytest.approx(1e-3)
    slow = Ran({i: Done(1.0, 5, 11.0 * i) for i in (1, 2, 3)}, 3.0, (), (), ())
    assert slower_than({"auto": [slow], "auto, measured before": [one], "FSDP2": [one], "by hand": [slow]}) == {
        "FSDP2": pytest.approx(1.1)
    }


def test_the_uneven_pipeline_has_layers_in_proportion_to_speeds() -> None:
    assert Pair(shares=(0.8, 0.32), layers=6).uneven_pipeline == "<[0]x4,[1]x2>"
    assert Pair(shares=(0.2, 0.8), layers=4).uneven_pipeline == "<[0]x1,[1]x3>"


def test_the_steps_of_a_run_are_priced_by_the_costs_of_the_files_by_hand(tmp_path: Path) -> None:
    costs, batches = priced.costs(6, priced.cluster(2)), ((700, 200, 100), (300,) * 4)
    plan = hg.plan(costs, hg.Workload(lengths=batches))
    hand = ByHand(tmp_path / "profile.json", tmp_path / "cluster.yaml", costs, batches, plan)
    texts = tuple(str(hg.Strategy.parse(text, 6)) for text in (hand.strategy, "<[0]x5,[1]x1>"))
    best, same = planned(hand, Ran({}, 0.0, (), texts[:1], ()), 6)
    assert best == pytest.approx(same)
    assert planned(hand, Ran({}, 0.0, (), texts, ()), 6)[0] > best

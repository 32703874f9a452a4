"""Traffic: the bytes of a matrix are those that the simulation moves, whoever is counted together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydragraph.cost.costs import Costs
from hydragraph.ir.instruction import Op
from hydragraph.report import bytes_moved
from hydragraph.report.bytes_moved import bytes_between, matrices
from hydragraph.report.facts import MOVED
from tests.report.made import TOKENS, four, simulated


def test_pulls_pushes_and_messages() -> None:
    on = four()
    run = simulated(on, "<[0]x2,[1]x2>", [5])
    moved = bytes_between(on, run.strategy, run.assignment, run.timeline)
    work = on.work(run.strategy, run.assignment)
    for kind, op in enumerate((Op.PULL, Op.PUSH)):
        assert moved[kind].sum() == pytest.approx(sum(work.moved(op, bucket.name).total for bucket in on.buckets))
    # Five hidden states ahead, and five gradients back.
    expected = np.zeros((4, 4))
    expected[0, 1] = expected[1, 0] = 5 * TOKENS * on.sizes.hidden_bytes
    assert moved[2] == pytest.approx(expected)
    assert not np.diagonal(moved, axis1=1, axis2=2).any()


def test_sums_within_stages_go_round_rings() -> None:
    """Two hidden states are added up forward and three backward in each layer, where curves leave that out."""
    on = four()
    pieces = {
        kind: {name: replace(piece, reduced=(2, 3) if name == "layer" else (0, 0)) for name, piece in blocks.items()}
        for kind, blocks in on.profile.pieces.items()
    }
    summing = Costs(replace(on.profile, pieces=pieces), on.cluster)
    run = simulated(summing, "<tp4,pp1>", [6])
    moved = bytes_between(summing, run.strategy, run.assignment, run.timeline)
    # A ring of four: three messages of a quarter to add up, and three to hand the sums round.
    each = 4 * (2 + 3) * 6 * TOKENS * on.sizes.hidden_bytes * 2 * 3 / 4
    expected = np.zeros((4, 4))
    expected[[0, 1, 2, 3], [1, 2, 3, 0]] = each
    assert moved[MOVED.index("tp")] == pytest.approx(expected)
    # Measured curves hold the sums, and pipelines of single ranks have none.
    for costs, text in ((on, "<tp4,pp1>"), (summing, "<tp1,pp4>")):
        run = simulated(costs, text, [6])
        assert not bytes_between(costs, run.strategy, run.assignment, run.timeline)[MOVED.index("tp")].any()


def test_nodes_sum_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    on = four()
    run = simulated(on, "<tp2,pp2>", [4])
    ranks, nodes = matrices(on, run.strategy, run.assignment, run.timeline)
    assert ranks.names == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert nodes.names == ("node 0", "node 1")
    assert ranks.totals == pytest.approx(nodes.totals)
    for fine, coarse in zip(ranks.cells, nodes.cells, strict=True):
        assert np.array(fine).reshape(2, 2, 2, 2).sum((1, 3)) == pytest.approx(np.array(coarse))
    # Of more ranks than rows only nodes are left.
    monkeypatch.setattr(bytes_moved, "MOST", 2)
    (only,) = matrices(on, run.strategy, run.assignment, run.timeline)
    assert only == nodes

"""Traffic: the bytes of a matrix are those that the simulation moves, whoever is counted together."""

from __future__ import annotations

import numpy as np
import pytest

from hydragraph.ir.instruction import Op
from hydragraph.report import bytes_moved
from hydragraph.report.bytes_moved import bytes_between, matrices
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

"""Ranks as threads: what they exchange, and what becomes of those that fail or do not meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from hydragraph.frontend.check.emulated_stage import EmulatedCollectives, generate_code, run_ranks
from hydragraph.private.tracing import code_when_called


def test_collectives_do_what_their_names_say() -> None:
    def rank(c: EmulatedCollectives) -> list[torch.Tensor]:
        x = torch.arange(6.0)[None] * (c.index + 1)
        return [
            c.all_reduce(x),
            c.all_reduce_max(x),
            c.all_gather(x, 1),
            c.reduce_scatter(x, 1),
            c.split(x, 1),
        ]

    x = torch.arange(6.0)[None]
    for index, (total, most, gathered, scattered, split) in enumerate(run_ranks(3, rank)):
        assert total.equal(6 * x)
        assert most.equal(3 * x)
        assert gathered.equal(torch.cat([x, 2 * x, 3 * x], 1))
        assert scattered.equal(6 * x[:, 2 * index : 2 * index + 2])
        assert split.equal((index + 1) * x[:, 2 * index : 2 * index + 2])


def test_the_rank_that_failed_is_the_one_that_is_named() -> None:
    def rank(c: EmulatedCollectives) -> None:
        if c.index == 1:
            raise ValueError("the second")
        c.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="the second"):
        run_ranks(3, rank)


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (["all_reduce"], r"rank 0: all_reduce \[1\]; rank 1: the end \[\]"),
        (["all_reduce", "all_reduce_max"], r"rank 0: all_reduce_max \[1\]; rank 1: all_reduce \[1\]"),
    ],
)
def test_ranks_that_do_not_meet_are_told(calls: list[str], sentence: str) -> None:
    def rank(c: EmulatedCollectives) -> None:
        for call in calls[:: -1 if c.index == 0 else 1][c.index * (len(calls) == 1) :]:
            getattr(c, call)(torch.zeros(1))

    with pytest.raises(RuntimeError, match=sentence):
        run_ranks(2, rank)


def test_shapes_that_differ_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1: all_reduce \[2\]"):
        run_ranks(2, lambda c: c.all_reduce(torch.zeros(c.index + 1)))


def test_code_is_generated_before_threads_call_a_graph() -> None:
    with code_when_called():
        graph = fx.symbolic_trace(torch.nn.Linear(2, 3))
    assert graph.forward.__name__ == "_lazy_forward"
    variant: Any = SimpleNamespace(forward=graph, backward=None)
    generate_code([variant])
    assert graph.forward.__name__ == "forward"
    assert [y.shape for y in run_ranks(3, lambda _: graph(torch.ones(1, 2)))] == [(1, 3)] * 3

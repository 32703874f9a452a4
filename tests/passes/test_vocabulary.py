"""The example of the module's legend, and the loss of parts against PyTorch's of the whole; ranks are run in turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from hydragraph.passes import collective_operators  # noqa: F401  registers hydragraph::tp_*
from hydragraph.passes.vocabulary import MEAN, NONE, SUM, embedding_part, loss_of_parts

tp_ops = torch.ops.hydragraph


class OnOneRank(fx.Interpreter):
    """Runs a rank's graph; `meet` says what a collective returns for this rank's part."""

    def __init__(self, module: fx.GraphModule, meet: Callable[[object, Tensor], Tensor]) -> None:
        super().__init__(module)
        self.meet = meet

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (tp_ops.tp_max.default, tp_ops.tp_sum.default):
            return self.meet(target, args[0])
        return super().call_function(target, args, kwargs)


def test_each_rank_reads_its_rows_and_the_sum_is_the_whole() -> None:
    table = torch.arange(1.0, 6).repeat(3, 1).T  # row i is full of i + 1
    parts = []
    for first, last in ((0, 2), (2, 5)):
        graph = fx.Graph()
        weight, ids, start = (graph.placeholder(name) for name in ("weight", "ids", "start"))
        graph.output(embedding_part(graph, (weight, ids), start, last - first))
        parts.append(fx.GraphModule({}, graph)(table[first:last], torch.tensor([1, 4]), torch.tensor(first)))
    assert parts[0].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert parts[1].tolist() == [[0, 0, 0], [5, 5, 5]]
    assert torch.equal(parts[0] + parts[1], table[[1, 4]])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 4, 5)])
def test_the_loss_of_parts_is_that_of_the_whole(cuts: tuple[int, ...], reduction: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(len(cuts))
    logits = 30 * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, -100, 2, 1, 3, -100])
    ranges = list(pairwise(cuts))
    modules = []
    for first, last in ranges:
        graph = fx.Graph()
        part, targets, start = (graph.placeholder(name) for name in ("part", "targets", "start"))
        arguments = (part, targets, None, reduction, -100, smoothing)
        graph.output(loss_of_parts(graph, arguments, start, last - first, 5))
        modules.append(fx.GraphModule({}, graph))

    def run(rank: int, meet: Callable[[object, Tensor], Tensor]) -> Tensor:
        first, last = ranges[rank]
        loss: Tensor = OnOneRank(modules[rank], meet).run(logits[:, first:last], labels, torch.tensor(first))
        return loss

    # First every rank's maximum, then, with that of all, every rank's two sums, then the loss: equal on every rank.
    largest = logits.amax(-1)
    sums: list[Tensor] = []

    def note(target: object, value: Tensor) -> Tensor:
        if target is tp_ops.tp_sum.default:
            sums.append(value)
        return largest if target is tp_ops.tp_max.default else value

    for rank in range(len(ranges)):
        run(rank, note)
    total = torch.stack(sums).sum(0)
    name = {NONE: "none", MEAN: "mean", SUM: "sum"}[reduction]
    expected = F.cross_entropy(logits, labels, reduction=name, label_smoothing=smoothing)
    for rank in range(len(ranges)):
        loss = run(rank, lambda target, _: largest if target is tp_ops.tp_max.default else total)
        assert torch.allclose(loss, expected, rtol=1e-12)

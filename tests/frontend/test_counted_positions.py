"""Positions that a model counts by `torch.arange` start anew in each packed sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hydragraph as hg
from hydragraph.frontend.capture import capture
from hydragraph.frontend.counted_positions import use_position_ids
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.ir.graph_data import value_of
from hydragraph.private.tracing import symbol_name
from tests.frontend.execute import batch, loss
from tests.models import randomised
from tests.own_models import Own
from tests.thorough import only

COUNTERS: dict[str, Callable[[int], Tensor]] = {
    "integers": lambda n: torch.arange(n),
    "floats from 0": lambda n: torch.arange(0, n, dtype=torch.float32).long(),
    "in steps of one": lambda n: torch.arange(0, n, 1) * 2 + 1,
    "all of these": lambda n: (
        torch.arange(n) + torch.arange(0, n, dtype=torch.float32).long() + torch.arange(0, n, 1) * 2 + 1
    ),
}


class Scaled(nn.Module):
    """A layer whose output grows with the position that it counts itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.layer(x, cu_seqlens) * torch.log1p(torch.arange(x.shape[0], device=x.device))[:, None]


class Counting(Own):
    """Counts positions before its blocks, and in the last one."""

    def __init__(self, counter: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.counter = counter
        self.stack[1] = Scaled(self.stack[1])

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        """Return logits [1, T, outputs]."""
        return super().forward(input_ids, self.counter(input_ids.shape[1])[None], cu_seqlens)


@only("all of these")
@pytest.mark.parametrize("counter", COUNTERS.values(), ids=list(COUNTERS))
def test_positions_start_anew_in_each_sequence(counter: Callable[[int], Tensor]) -> None:
    model = randomised(Counting(counter))
    program, given, alone = capture(model, blocks="stack"), batch([5, 3, 9]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(given["input_ids"][:, a:b], torch.tensor([0, b - a], dtype=torch.int32))[0]
        alone = alone + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    packed, parameters = loss(program, model, given), list(model.parameters())
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)
    found, expected = (torch.autograd.grad(x, parameters) for x in (packed, alone))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_counter_from_one_is_refused() -> None:
    model = Counting(lambda n: torch.arange(1, n + 1))
    with pytest.raises(hg.Unsupported, match=r"before its first block: aten.arange\S* counts .*position_ids"):
        capture(model, blocks="stack")


class Traced(nn.Module):
    """A function of x [1, T, 8]."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """Return what `compute` does."""
        return self.compute(x)


def traced(compute: Callable[[Tensor], Tensor]) -> tuple[fx.Graph, str]:
    """Return the graph of a function and the symbol of its token count."""
    sizes = ({1: torch.export.Dim("T", min=3, max=1 << 20)},)
    exported = export(Traced(compute), (torch.zeros(1, 7, 8, device="meta"),), sizes, "test")
    graph, signature = functional_graph(exported, "test")
    given = next(n for n in graph.graph.nodes if n.name == signature.user_inputs[0])
    symbol = symbol_name(value_of(given).shape[1])
    assert symbol is not None
    return graph.graph, symbol


def scattered(x: Tensor) -> Tensor:
    order = x[0, :, 0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(x.shape[1], device=x.device)
    return x[:, order][:, inverse]


@pytest.mark.parametrize(
    "compute",
    [
        scattered,
        lambda x: x[:, torch.arange(x.shape[1], device=x.device)],
        lambda x: x * torch.arange(8, device=x.device),
        lambda x: x * torch.arange(1, x.shape[1] + 1, device=x.device)[:, None],
        lambda x: x * torch.arange(0, 2 * x.shape[1], 2, device=x.device)[:, None],
    ],
    ids=["routing", "rows", "features", "from one", "in steps of two"],
)
def test_other_counters_are_left_as_they_are(compute: Callable[[Tensor], Tensor]) -> None:
    graph, tokens = traced(compute)
    before = str(graph)
    use_position_ids(graph, tokens)
    assert str(graph) == before


def test_a_block_gets_one_more_input() -> None:
    graph, tokens = traced(lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None])
    use_position_ids(graph, tokens)
    (positions,) = (n for n in graph.find_nodes(op="placeholder") if n.name == "added_positions")
    assert value_of(positions).dtype is torch.int64
    assert [symbol_name(size) for size in value_of(positions).shape] == [None, tokens]
    assert not [n for n in graph.nodes if "arange" in str(n.target)]

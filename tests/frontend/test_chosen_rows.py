"""Rows that a mask selects are computed for all tokens: equal results and gradients, or the graph stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hydragraph as hg
from hydragraph.frontend import chosen_rows
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.token_axes import mixing
from hydragraph.ir.graph_data import value_of
from hydragraph.private.tracing import symbol_name
from tests.own_models import Own
from tests.thorough import only, thorough

WIDTH, EXPERTS = 8, 2

Compute = Callable[[Tensor], Tensor]


def expert(number: int, x: Tensor) -> Tensor:
    """Return what one expert computes of each row."""
    scale = torch.linspace(0.5, 1.5 + number, WIDTH, device=x.device)
    return torch.tanh(x @ scale.outer(scale) * 0.1)


def by_places(x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    choice, y = rows[:, :EXPERTS].argmax(-1), torch.zeros_like(rows)
    for number in range(EXPERTS):
        chosen = torch.where(choice == number)[0]
        y[chosen] = expert(number, rows[chosen])
    return y.view_as(x)


def by_mask(x: Tensor) -> Tensor:
    choice, y = x[..., :EXPERTS].argmax(-1), torch.zeros_like(x)
    for number in range(EXPERTS):
        y[choice == number] = expert(number, x[choice == number])
    return y


def by_nonzero(x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    choice, y = rows[:, :EXPERTS].argmax(-1), torch.zeros_like(rows)
    for number in range(EXPERTS):
        chosen = (choice == number).nonzero().squeeze(-1)
        y = y.index_copy(0, chosen, expert(number, rows.index_select(0, chosen)))
    return y.view_as(x)


def two_choices(x: Tensor) -> Tensor:
    """Compute as the first implementation of Mixtral in transformers does."""
    rows = x.reshape(-1, WIDTH)
    weights, choices = rows[:, :EXPERTS].softmax(-1).topk(2, -1)
    y, mask = torch.zeros_like(rows), F.one_hot(choices, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, token = torch.where(mask[number])
        y.index_add_(0, token, expert(number, rows[None, token].reshape(-1, WIDTH)) * weights[token, place, None])
    return y.reshape(x.shape)


def two_choices_by_token(x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    weights, choices = rows[:, :EXPERTS].softmax(-1).topk(2, -1)
    y = torch.zeros_like(rows)
    for number in range(EXPERTS):
        token, place = (choices == number).nonzero(as_tuple=True)
        y = y.index_add(0, token, expert(number, rows[token]) * weights[token, place].unsqueeze(-1))
    return y.reshape(x.shape)


def scaled(x: Tensor) -> Tensor:
    y, mask = expert(0, x).clone(), x.sum(-1) > 0
    y[mask] = y[mask] * 0.1
    return y


def scaled_elements(x: Tensor) -> Tensor:
    y = expert(0, x).clone()
    y[x > 0] = y[x > 0] * 0.1
    return y


def replaced(x: Tensor) -> Tensor:
    y = expert(0, x).clone()
    y[x.sum(-1) > 0] = torch.linspace(0, 1, WIDTH, device=x.device)
    return y


def added(x: Tensor) -> Tensor:
    rows = expert(0, x).reshape(-1, WIDTH)
    at = torch.where(rows.sum(-1) > 0)[0]
    return rows.index_put((at,), rows[at] * 0.3, accumulate=True).view_as(x)


def chosen_again(x: Tensor) -> Tensor:
    y = expert(0, x).clone()
    y[y.sum(-1) > 0] = y[y.sum(-1) > 0] * -0.5
    y[y.sum(-1) > 0] = y[y.sum(-1) > 0] + 1
    return y


EQUAL = (
    added,
    chosen_again,
    by_places,
    by_mask,
    by_nonzero,
    two_choices,
    two_choices_by_token,
    scaled,
    scaled_elements,
    replaced,
)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and the places of those with a positive sum."""
    rows = expert(0, x).reshape(-1, WIDTH)
    return rows, torch.where(rows.sum(-1) > 0)[0]


def centred(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[at] - rows[at].mean(0))


def reversed_(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[at].flip(0))


def counted(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[at] / at.shape[0])


def of_places(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[at] * at[:, None])


def elsewhere(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, torch.where(rows.sum(-1) >= 0)[0], rows[at])


def among_chosen(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[at].softmax(0))


def chosen_of_chosen(rows: Tensor, at: Tensor) -> Tensor:
    again = torch.where(rows[at][:, 0] > 0)[0]
    return rows.index_add(0, again, rows[at][again])


def joined(rows: Tensor, at: Tensor) -> Tensor:
    token, _ = (rows[:, :2].topk(2, -1)[1] >= 0).nonzero(as_tuple=True)
    pairs = rows[token].reshape(-1, 2 * WIDTH).flip(-1).reshape(-1, WIDTH)
    return rows.index_add(0, token, pairs)


def table(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, F.embedding(at, torch.ones(500, WIDTH, device=rows.device)))


def neighbour(rows: Tensor, at: Tensor) -> Tensor:
    return rows.index_add(0, at, rows[(at - 1).clamp(min=0)])


MIXING = (neighbour, centred, reversed_, counted, of_places, elsewhere, among_chosen, chosen_of_chosen, joined, table)


class Block(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)


def traced(compute: Compute) -> tuple[fx.GraphModule, str]:
    """Return the graph of a block and the symbol of its number of tokens."""
    example = torch.empty(1, 7, WIDTH, device="meta", requires_grad=True)
    exported = export(Block(compute), (example,), ({1: torch.export.Dim("T", min=2, max=1 << 20)},), "layer.0")
    graph = functional_graph(exported, "layer.0", block=True)[0]
    given = next(n for n in graph.graph.nodes if n.op == "placeholder")
    symbol = symbol_name(value_of(given).shape[1])
    assert symbol is not None
    return graph, symbol


@only("by_places", "two_choices", "scaled")
@pytest.mark.parametrize("compute", EQUAL, ids=lambda compute: compute.__name__)
def test_a_selection_is_computed_for_all_rows_with_equal_gradients_and_its_block_named(
    compute: Compute, caplog: pytest.LogCaptureFixture
) -> None:
    graph, tokens = traced(compute)
    said = [r.getMessage().partition(",")[0] for r in caplog.records if r.name == chosen_rows.__name__]
    assert said == ["layer.0: the block processes all tokens instead of only those that a mask selects"]
    assert mixing(graph, tokens) is None
    for length in (2, 11):
        results = []
        for run in (compute, lambda x: graph(x)[0]):
            x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(length)).requires_grad_()
            result = run(x * 1.0)
            (gradient,) = torch.autograd.grad(result.square().sum(), x)
            results.append((result.detach(), gradient))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@only("centred", "of_places", "elsewhere", "joined")
@pytest.mark.parametrize("compute", MIXING, ids=lambda compute: compute.__name__)
def test_what_reads_the_places_or_other_rows_is_still_found(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph, tokens = traced(lambda x: compute(*places(x)).view_as(x))
    assert mixing(graph, tokens) is not None


@thorough
def test_a_model_with_experts_by_masks_passes_the_numeric_check() -> None:
    def compute(x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (32 // WIDTH, WIDTH))
        return torch.cat([two_choices(part[None])[0] for part in parts.unbind(-2)], -1)

    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(compute(x))

    model = Own(layers=2)
    model.stack[0].gate = Wide(32, 51)
    hg.capture(model, check="auto")

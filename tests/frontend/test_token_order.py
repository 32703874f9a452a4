"""Rows that are sent to experts and back are proven to keep tokens apart; whatever else sorts tokens is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.token_axes import mixing
from hydragraph.ir.graph_data import value_of
from hydragraph.private.tracing import symbol_name
from tests.thorough import only, thorough

EXPERTS, WIDTH = 4, 8


class Traced(nn.Module):
    """A function of x [1, T, 8] that a block computes, with a router and the weights of experts."""

    def __init__(self, compute: Callable[[Traced, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, 8] -> whatever `compute` returns."""
        return self.compute(self, x)

    def chosen(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, [T, k]."""
        weights, ids = self.router(x[0]).softmax(-1).topk(k, -1)
        return ids, weights


def found(compute: Callable[[Traced, Tensor], Tensor]) -> str | None:
    """Return the operator that may mix tokens."""
    sizes = ({1: torch.export.Dim("T", min=3, max=1 << 20)},)
    exported = export(Traced(compute).to("meta"), (torch.zeros(1, 7, WIDTH, device="meta"),), sizes, "test")
    graph, signature = functional_graph(exported, "test")
    given = next(n for n in graph.graph.nodes if n.name == signature.user_inputs[0])
    symbol = symbol_name(value_of(given).shape[1])
    assert symbol is not None
    problem = mixing(graph, symbol)
    return problem and problem[0]


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert as transformers does."""
    import transformers.integrations.moe  # noqa: F401  registers the operator

    product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return product


def ends_of(keys: Tensor) -> Tensor:
    counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return counts.cumsum(0, dtype=torch.int32)


def back(rows: Tensor, permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.size(0), device=rows.device)
    return rows[inverse]


def experts(block: Traced, x: Tensor, k: int = 2) -> Tensor:
    """As transformers sends tokens to experts."""
    ids, weights = block.chosen(x, k)
    keys, permutation = ids.reshape(-1).sort()
    rows = grouped(x[0][permutation // k], block.experts, ends_of(keys)) * weights.reshape(-1)[permutation, None]
    return back(rows, permutation).view(-1, k, WIDTH).sum(1)[None]


def by_adding(block: Traced, x: Tensor) -> Tensor:
    """The rows of experts are added to the tokens that they came from."""
    ids, weights = block.chosen(x, 2)
    flat = ids.view(-1)
    permutation = flat.argsort(stable=True)
    source = permutation // 2
    rows = grouped(x[0][source], block.experts, ends_of(flat[permutation])) * weights.view(-1)[permutation, None]
    return torch.zeros_like(x[0]).index_add(0, source, rows)[None]


def repeated(block: Traced, x: Tensor) -> Tensor:
    """Each token is repeated for its experts, and the order is turned round by sorting it."""
    ids, weights = block.chosen(x, 2)
    keys, permutation = ids.view(-1).sort()
    rows = grouped(x[0].repeat_interleave(2, 0)[permutation], block.experts, ends_of(keys))
    return (rows[permutation.argsort()].view(-1, 2, WIDTH) * weights[..., None]).sum(1)[None]


def copied(block: Traced, x: Tensor) -> Tensor:
    """As Llama 4 has it: all tokens once for each expert, in one dimension and in two."""
    scores = block.router(x[0]).sigmoid()
    rows = x[0].repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
    rows = torch.bmm(rows.view(EXPERTS, -1, WIDTH), block.experts).view(-1, WIDTH)
    return rows.reshape(EXPERTS, -1, WIDTH).sum(0)[None]


@only("by_adding", "repeated", "copied")
@pytest.mark.parametrize("compute", [experts, lambda b, x: experts(b, x, 1), by_adding, repeated, copied])
def test_what_is_sent_to_experts_and_back_keeps_tokens_apart(compute: Callable[[Traced, Tensor], Tensor]) -> None:
    assert found(compute) is None


def not_back(block: Traced, x: Tensor) -> Tensor:
    keys, permutation = block.chosen(x, 1)[0].view(-1).sort()
    return grouped(x[0][permutation], block.experts, ends_of(keys))[None]


def back_by_another(block: Traced, x: Tensor) -> Tensor:
    ids = block.chosen(x, 2)[0]
    permutation, other = ids[:, 0].argsort(), ids[:, 1].argsort()
    return back(x[0][permutation], other)[None]


def place_as_data(block: Traced, x: Tensor) -> Tensor:
    permutation = block.chosen(x, 1)[0].view(-1).argsort()
    return x * permutation[None, :, None]


def counts_as_data(block: Traced, x: Tensor) -> Tensor:
    keys = block.chosen(x, 1)[0].view(-1).sort().values
    return x * torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).amax()


def the_most_first(block: Traced, x: Tensor) -> Tensor:
    keys, permutation = block.chosen(x, 1)[0].view(-1).sort(descending=True)
    return back(grouped(x[0][permutation], block.experts, ends_of(keys)), permutation)[None]


def grouped_by_others(block: Traced, x: Tensor) -> Tensor:
    ids = block.chosen(x, 2)[0]
    permutation = ids[:, 0].argsort()
    return back(grouped(x[0][permutation], block.experts, ends_of(ids[:, 1].sort().values)), permutation)[None]


def sorted_by_what_may_be_negative(block: Traced, x: Tensor) -> Tensor:
    keys, permutation = x[0, :, 0].sort()
    return back(grouped(x[0][permutation], block.experts, ends_of(keys)), permutation)[None]


def neighbours_in_the_order(block: Traced, x: Tensor) -> Tensor:
    permutation = block.chosen(x, 1)[0].view(-1).argsort()
    rows = x[0][permutation]
    return back(rows + rows.roll(1, 0), permutation)[None]


def the_wrong_quotient(block: Traced, x: Tensor) -> Tensor:
    permutation = block.chosen(x, 2)[0].view(-1).argsort()
    return back(x[0][permutation // 3], permutation).view(-1, 2, WIDTH).sum(1)[None]


def two_orders(block: Traced, x: Tensor) -> Tensor:
    return x + x[0][block.chosen(x, 1)[0].view(-1).argsort()]


def torn(block: Traced, x: Tensor) -> Tensor:
    return x + x[0].t().flatten().view(-1, WIDTH)[None]


def folded(block: Traced, x: Tensor) -> Tensor:
    return torch.cat([x, x], 0).flatten(0, 1).view(-1, 2, WIDTH).sum(1)[None]


def copies_as_neighbours(block: Traced, x: Tensor) -> Tensor:
    return x[0].repeat(2, 1).view(-1, 2, WIDTH).sum(1)[None]


def copies_beside_neighbours(block: Traced, x: Tensor) -> Tensor:
    return (x[0].repeat(2, 1) + x[0].repeat_interleave(2, 0)).view(2, -1, WIDTH).sum(0)[None]


def copies_of_copies(block: Traced, x: Tensor) -> Tensor:
    return x[0].repeat(4, 1).view(2, -1, WIDTH).sum(0)[None]


def counted(block: Traced, x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[1], device=x.device)[None, :, None]


@pytest.mark.parametrize(
    "compute",
    [
        *(not_back, back_by_another, place_as_data, counts_as_data, the_most_first, grouped_by_others),
        *(sorted_by_what_may_be_negative, the_wrong_quotient, two_orders, torn, folded),
        pytest.param(neighbours_in_the_order, marks=thorough),
        *(copies_as_neighbours, copies_beside_neighbours, copies_of_copies, counted),
    ],
)
def test_whatever_else_sorts_or_tears_tokens_is_found(compute: Callable[[Traced, Tensor], Tensor]) -> None:
    assert found(compute) is not None


@thorough
def test_a_mixture_of_experts_of_ones_own_is_captured() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.moe = nn.Linear(WIDTH, 3 * WIDTH), Traced(experts)

        def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
            q, k, v = (x.reshape(-1, 2, WIDTH // 2) for x in self.qkv(hidden).chunk(3, -1))
            hidden = hidden + hg.varlen_attention(q, k, v, cu_seqlens).reshape(1, -1, WIDTH)
            return hidden + self.moe(hidden)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31)
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, cu_seqlens)
            return self.head(hidden)

    torch.manual_seed(0)
    assert hg.capture(Model(), check="full").layers == 2

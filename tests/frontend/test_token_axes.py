"""Operators listed as token-wise are so numerically, and those that mix tokens are found; see test_token_order.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.token_axes import mixing
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.private.tracing import symbol_name
from tests.frontend.test_token_order import WIDTH, found

Along = Callable[[Tensor, int], Tensor]
Packed = Callable[[Tensor, Tensor, Tensor], Tensor]


def numbers(x: Tensor) -> Tensor:
    """Return other numbers for every feature, [8]."""
    return torch.linspace(0.5, 2.0, WIDTH, device=x.device)


def matrix(x: Tensor) -> Tensor:
    return numbers(x).outer(numbers(x)).triu()


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "second names": lambda x: torch.divide(torch.multiply(torch.absolute(x), 3), torch.subtract(numbers(x), 9)),
    "second names of comparisons": lambda x: x * torch.greater(x, 0) + torch.less_equal(x, numbers(x)) * x,
    "where": lambda x: torch.where(x > 0, 0.5, x) + torch.where(x > 0, x, 0.5) + torch.where(x > 0, 1.0, 2.0),
    "activations": lambda x: F.logsigmoid(x) + F.hardswish(x) + F.prelu(x, numbers(x)[:1]) + torch.special.expit(x),
    "compared": lambda x: x * torch.isclose(x, torch.zeros_like(x)) + torch.rsub(x, numbers(x)),
    "expanded like the tokens": lambda x: torch.lerp(x, numbers(x).expand_as(x), 0.3),
    "complex": lambda x: (torch.complex(x, x) * torch.complex(x, -x)).real,
    "written where": lambda x: x.clone().index_put((x > 1,), x.new_tensor(0.5)),
    "einsum": lambda x: torch.einsum("...i,ij->...j", x, matrix(x)),
    "inner": lambda x: torch.inner(x, matrix(x)) * torch.mv(x[0], numbers(x))[None, :, None],
    "bilinear": lambda x: F.bilinear(x, x * 2, matrix(x).expand(3, WIDTH, WIDTH)),
    "a recurrent cell": lambda x: torch.gru_cell(x[0], x[0] * 2, *matrix(x).repeat(2, 3, 1))[None],
    "cast like another": lambda x: x * (x > 0).to(x) + (x > 1).to(x.device, x.dtype),
    "bucketize": lambda x: x + torch.bucketize(x, numbers(x)),
    "a convolution of single elements": lambda x: F.conv1d(x.mT, matrix(x)[..., None], numbers(x)).mT,
    "a padded convolution by name": lambda x: F.conv1d(x.mT, matrix(x)[..., None], padding="same").mT,
    "tokens as rows": lambda x: F.group_norm(x[0], 2)[None] + F.avg_pool1d(x[0][:, None], 3, 1, 1)[:, 0][None],
}
ALONG: dict[str, Along] = {
    "var_mean": lambda x, dim: x - torch.var_mean(x, dim=dim, keepdim=True)[0],
    "aminmax": lambda x, dim: x - torch.aminmax(x, dim=dim, keepdim=True).max,
    "kthvalue": lambda x, dim: x - x.kthvalue(2, dim, keepdim=True).values,
    "quantile": lambda x, dim: x - x.quantile(0.5, dim, keepdim=True),
    "mode": lambda x, dim: x - (x * 2).round().mode(dim, keepdim=True).values,
    "nanmean": lambda x, dim: x - x.nanmean(dim, keepdim=True) + x.nansum(dim, keepdim=True),
    "fft": lambda x, dim: torch.fft.ifft(torch.fft.fft(x, dim=dim).real, dim=dim).real,
    "rfft": lambda x, dim: torch.fft.irfft(torch.fft.rfft(x, dim=dim) * 2j, n=x.shape[dim], dim=dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "linalg_norm": lambda x, dim: x / torch.linalg.norm(x, dim=dim, keepdim=True),
    "matrix_norm": lambda x, dim: x / torch.linalg.matrix_norm(x[None], dim=(0, dim % 3 + 1), keepdim=True)[0],
    "cosine_similarity": lambda x, dim: x * F.cosine_similarity(x, numbers(x)[None, None], dim).unsqueeze(dim),
    "written in one place": lambda x, dim: x.select_scatter(x.select(dim, 1) * 2, dim, 0),
    "scatter_reduce": lambda x, dim: x.scatter_reduce(dim, torch.zeros_like(x, dtype=torch.long), x, "sum"),
    "einsum": lambda x, dim: x * torch.einsum("...ij->...j" if dim == 1 else "...ij->...i", x).unsqueeze(dim),
}


def keeps(compute: Callable[[Tensor], Tensor]) -> bool:
    """Say whether two sequences in one row get what each gets alone, within rounding."""
    first, second = torch.randn(2, 1, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    together = compute(torch.cat([first, second], 1))
    return torch.allclose(together, torch.cat([compute(first), compute(second)], 1), atol=1e-5)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_computes_each_token_from_itself_is_known(name: str) -> None:
    compute = ELEMENTWISE[name]
    assert keeps(compute)
    assert found(lambda _, x: compute(x)) is None


@pytest.mark.parametrize("name", ALONG)
def test_an_operator_along_a_dimension_mixes_tokens_where_they_stand_along_it(name: str) -> None:
    for dim in (-1, 1):
        mixes = found(lambda _, x, dim=dim: ALONG[name](x, dim)) is not None
        assert mixes == (not keeps(lambda x, dim=dim: ALONG[name](x, dim)))
        assert mixes == (dim == 1)
    assert found(lambda _, x: x + far(ALONG[name](x, 1))) is not None


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}])
def test_a_convolution_that_moves_elements_is_refused(options: dict[str, int]) -> None:
    assert found(lambda _, x: F.conv1d(x.mT, matrix(x)[..., None], **options).mT) is not None  # pyrefly: ignore[no-matching-overload]


class Given(nn.Module):
    """A function of x [T, 8], cu_seqlens and max_length."""

    def __init__(self, compute: Packed) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_length: Tensor) -> Tensor:
        return self.compute(x, cu_seqlens, max_length)


def found_with_bounds(compute: Packed) -> str | None:
    """Return what may depend on the other sequences of a row."""
    batch = torch.zeros(7, WIDTH), torch.zeros(5, dtype=torch.int32), torch.tensor(4)
    batch = tuple(value.to("meta") for value in batch)
    sizes = ({0: torch.export.Dim("T", min=3, max=1 << 20)}, {0: torch.export.Dim("N", min=3, max=1 << 20)}, None)
    graph, _ = functional_graph(export(Given(compute).to("meta"), batch, sizes, "test"), "test")
    symbol = symbol_name(value_of(placeholders_of(graph)[-3]).shape[0])
    assert symbol is not None
    problem = mixing(graph, symbol, 3)
    return problem and problem[1]


def attended(x: Tensor, cu: Tensor, longest: Tensor, **changed: Tensor) -> Tensor:
    q = x.view(-1, 2, 4)
    given = {"q": q, "k": q, "v": q, "cu_seqlens": cu, "max_length": longest, "causal": True, "scale": 0.5} | changed
    return torch.ops.hydragraph.varlen_attention(**given)[0].flatten(1)


def loss_of(x: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(x, x.argmax(-1), reduction=reduction)


def far(value: Tensor) -> Tensor:
    """Return 0 for all values that a numeric check would try."""
    return F.relu(value - 1e4)


BY_THE_ROW: dict[str, Packed] = {
    "the longest sequence": lambda x, cu, longest: x * far(longest),
    "the longest sequence for every token": lambda x, cu, longest: x * far(longest).expand(x.shape[0], 1),
    "the longest sequence repeated": lambda x, cu, longest: x * far(longest).repeat(x.shape[0], 1),
    "zeros and the longest sequence": lambda x, cu, longest: x * far(torch.zeros_like(x) + longest),
    "the number of sequences": lambda x, cu, longest: x * far(torch.ones_like(cu).sum()),
    "sequences of a constant": lambda x, cu, longest: x * far(numbers(x)[:1].expand_as(cu).sum()),
    "each token as often as sequences": lambda x, cu, longest: far(x[..., None].expand(-1, -1, cu.shape[0]).sum(-1)),
    "the attention sink": lambda x, cu, longest: attended(x, cu, longest, sink=far(longest).expand(2)),
    "a value for every token": lambda x, cu, longest: attended(x, cu, longest, v=(x * 0 + longest).view(-1, 2, 4)),
    "tokens as a new value": lambda x, cu, longest: x * (1 + x.new_full((1,), x.shape[0] // 512)),
    "tokens as a new value like another": lambda x, cu, longest: x * torch.full_like(numbers(x), x.shape[0] // 512),
    "tokens as a value": lambda x, cu, longest: x + torch.full((1,), x.shape[0] // 512, device=x.device),
    "tokens as an option": lambda x, cu, longest: torch.add(x, x, alpha=x.shape[0] // 512 + 2),
    "tokens as a limit": lambda x, cu, longest: x.clamp(max=x.shape[0]),
    "tokens as a shift": lambda x, cu, longest: x * numbers(x).roll(x.shape[0] // 512),
    "tokens as an index": lambda x, cu, longest: x * numbers(x).repeat(512)[x.shape[0] // 512],
    "tokens as the end of a range": lambda x, cu, longest: x * torch.linspace(0, x.shape[0], 8, device=x.device),
    "the longest sequence as a new value": lambda x, cu, longest: x * x.new_full((1,), longest.item()),
    "the loss of all tokens": lambda x, cu, longest: x * far(loss_of(x, "sum")),
    "the mean loss of all tokens": lambda x, cu, longest: x * far(loss_of(x, "mean")),
    "the loss of features": lambda x, cu, longest: x * far(F.cross_entropy(x.t(), numbers(x).long(), reduction="none")),
    "the sum of bounds": lambda x, cu, longest: x * far(cu.sum()),
}


@pytest.mark.parametrize("name", BY_THE_ROW)
def test_what_depends_on_the_row_is_found_behind_a_threshold(name: str) -> None:
    assert found_with_bounds(BY_THE_ROW[name]) is not None


@pytest.mark.parametrize(
    "compute",
    [lambda x: x[:, -x.shape[1] :], lambda x: x + x.new_full((x.shape[1], 1), 0.5), lambda x: x.new_ones(x.shape)],
)
def test_tokens_may_count_as_sizes(compute: Callable[[Tensor], Tensor]) -> None:
    assert found(lambda _, x: compute(x)) is None


def test_a_loss_of_each_token_is_known_and_only_a_result_may_be_a_sum() -> None:
    assert found_with_bounds(lambda x, *_: x * loss_of(x, "none")[:, None]) is None
    assert found_with_bounds(lambda x, *_: loss_of(x, "sum").reshape([])) is None


def test_attention_may_read_the_bounds_and_nothing_else_of_the_row() -> None:
    assert found_with_bounds(attended) is None
    assert found_with_bounds(lambda x, cu, longest: attended(x, cu, longest, sink=numbers(x)[:2])) is None

"""The fused head with a loss per token against eager PyTorch, whole and with the vocabulary cut."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.kernels import linear_cross_entropy as head
from hydragraph.kernels.linear_token_losses import head_token_gradients, head_token_losses, losses_of
from tests.kernels.interpreter import interpreted
from tests.kernels.test_linear_cross_entropy import BOUND, common_factor, compare, inputs


def factors_of(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def expected(x: Tensor, weight: Tensor, labels: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
    """Return the losses and the gradients of their weighted sum, in fp64."""
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    losses = F.cross_entropy(wide[0] @ wide[1].T, labels, ignore_index=-100, reduction="none")
    return (losses, *torch.autograd.grad((losses * factors.double()).sum(), wide))


def against_double(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
    x, weight, labels = inputs(tokens, hidden, vocabulary, dtype)
    losses, _ = head_token_losses(x, weight, labels, -100)
    factors = factors_of(tokens, losses.dtype)
    found = (losses, *torch.autograd.grad((losses * factors).sum(), (x, weight)))
    assert [t.dtype for t in found] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    compare(found, expected(x, weight, labels, factors), dtype)
    assert not losses[labels == -100].any()


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(1, 10),
)
def test_any_chunks_equal_eager(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "chunk_tokens", lambda *_: chunk)
        against_double(tokens, hidden, vocabulary, dtype)


@pytest.mark.parametrize("dtype", BOUND)
def test_each_dtype_is_as_good_as_its_inputs(dtype: torch.dtype) -> None:
    against_double(300, 16, 50, dtype)


def test_a_divisor_is_not_rounded_to_16_bits() -> None:
    x, weight, labels = inputs(300, 64, 500, torch.bfloat16)
    losses, _ = head_token_losses(x, weight, labels, -100)
    whole = torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True)
    for found, gradient in zip(torch.autograd.grad(losses.sum() / 3000, (x, weight)), whole, strict=True):
        assert common_factor(found, gradient) * 3000 == pytest.approx(1, abs=1e-4)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels(dtype: torch.dtype) -> None:
    against_double(12, 8, 50, dtype)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_cut_vocabulary_equals_the_whole(sizes: list[int]) -> None:
    x, weight, labels = inputs(9, 5, sum(sizes), torch.float64)
    factors = factors_of(9, torch.float64)
    losses, of_hidden, of_weight = expected(x, weight, labels, factors)
    x, weight = x.detach(), weight.detach()
    cuts = list(pairwise([0, *accumulate(sizes)]))
    everyone = torch.stack([head.reference_statistics(x @ weight[a:b].T, labels, a) for a, b in cuts])
    hidden_gradient, weight_gradients = torch.zeros_like(x), []
    for first, last in cuts:
        part = weight[first:last]
        found, lse = losses_of(x, part, labels, -100, last - first, first, lambda _: head.combine(everyone))
        torch.testing.assert_close(found, losses)
        start = torch.tensor(first)
        d_hidden, d_weight = head_token_gradients(x, part, labels, lse, factors, start, -100, True, True)
        hidden_gradient += d_hidden
        weight_gradients.append(d_weight)
    compare((hidden_gradient, torch.cat(weight_gradients)), (of_hidden, of_weight), torch.float64)


def test_only_the_gradients_that_are_needed_are_made() -> None:
    x, weight, labels = inputs(20, 4, 30, torch.float32)
    losses, lse = head_token_losses(x.detach(), weight.detach(), labels, -100)
    arguments = (x.detach(), weight.detach(), labels, lse, torch.ones_like(losses), None, -100)
    both = head_token_gradients(*arguments, True, True)
    assert torch.equal(head_token_gradients(*arguments, True, False)[0], both[0])
    assert torch.equal(head_token_gradients(*arguments, False, True)[1], both[1])
    assert head_token_gradients(*arguments, True, False)[1].numel() == 0


def test_an_ignored_token_counts_for_nothing_even_if_its_factor_is_not_finite() -> None:
    x, weight, labels = inputs(8, 4, 30, torch.float32)
    losses, lse = head_token_losses(x.detach(), weight.detach(), labels, -100)
    factors = torch.where(labels == -100, torch.nan, torch.ones_like(losses))
    gradients = head_token_gradients(x.detach(), weight.detach(), labels, lse, factors, None, -100, True, True)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][labels == -100].any()


def test_no_logits_of_more_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for name in ("statistics_of", "to_gradient"):
        honest = getattr(head, name)

        def seen(logits: Tensor, *rest: object, honest: object = honest) -> object:
            rows.append(len(logits))
            return honest(logits, *rest)

        monkeypatch.setattr(head, name, seen)
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: 6)
    x, weight, labels = inputs(20, 4, 30, torch.float32)
    head_token_losses(x, weight, labels, -100)[0].sum().backward()
    assert rows == [6, 6, 6, 2] * 2

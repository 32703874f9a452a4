"""The fused head and loss against eager PyTorch, whole and with the vocabulary cut."""

# pyrefly: ignore-errors[bad-argument-type, bad-keyword-argument]
from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.memory import LiveBytes
from hydragraph.kernels import linear_cross_entropy as module
from hydragraph.kernels.linear_cross_entropy import (
    chunk_tokens,
    combine,
    loss_and_gradients,
    reference,
    target_of,
    working_bytes,
)
from tests.kernels.interpreter import interpreted

BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def inputs(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[1::4] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def fused(x: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None, smoothing: float = 0.0) -> Tensor:
    """Return the loss of the operator, in chunks of `chunk` tokens; None: the default."""
    with mock.patch.object(module, "chunk_tokens", return_value=chunk) if chunk else nullcontext():
        loss: Tensor = module.head_loss(x, weight, labels, -100, smoothing)[0]
        return loss


def results(loss: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of 0.7 times it."""
    return (loss, *torch.autograd.grad(0.7 * loss, (x, weight)))


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        error = float((a.detach().double() - b.detach().double()).norm())
        assert error <= BOUND[dtype] * float(b.detach().norm()) + 1e-12


def against_double(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, chunk: int | None, smoothing: float = 0.0
) -> None:
    x, weight, labels = inputs(tokens, hidden, vocabulary, dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    found = results(fused(x, weight, labels, chunk, smoothing), x, weight)
    assert [t.dtype for t in found] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    compare(found, results(reference(*wide, labels, smoothing=smoothing), *wide), dtype)


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 10)),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_any_chunks_equal_eager(
    tokens: int, hidden: int, vocabulary: int, chunk: int | None, dtype: torch.dtype, smoothing: float
) -> None:
    against_double(tokens, hidden, vocabulary, dtype, chunk, smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 7])
def test_each_dtype_is_as_good_as_its_inputs(dtype: torch.dtype, chunk: int | None) -> None:
    against_double(40, 16, 50, dtype, chunk)


def common_factor(found: Tensor, whole: Tensor) -> float:
    return float((found.double() * whole.double()).sum() / whole.double().square().sum())


def test_a_divisor_is_not_rounded_to_16_bits() -> None:
    x, weight, labels = inputs(300, 64, 500, torch.bfloat16)
    loss = fused(x, weight, labels)
    whole = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for found, gradient in zip(torch.autograd.grad(loss / 3000, (x, weight)), whole, strict=True):
        assert common_factor(found, gradient) * 3000 == pytest.approx(1, abs=1e-4)


def test_fp32_equals_eager_fp32() -> None:
    x, weight, labels = inputs(40, 16, 50, torch.float32)
    found = results(fused(x, weight, labels, chunk=8), x, weight)
    compare(found, results(reference(x, weight, labels), x, weight), torch.float32)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "smoothing"), [(1, 0.0), (50, 0.1), (5000, 0.0), (5000, 0.1)])
def test_the_kernels(dtype: torch.dtype, vocabulary: int, smoothing: float) -> None:
    against_double(12, 8, vocabulary, dtype, 7, smoothing)


@interpreted
def test_the_kernels_of_a_cut_vocabulary() -> None:
    against_cut([30, 1, 19], torch.float32, 0.1)


@interpreted
def test_the_kernels_stand_infinite_logits() -> None:
    logits = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), 1.0]])
    labels = torch.tensor([-100, 2])
    found = module.statistics_of(logits, labels, 0)
    assert found[:, 0].tolist() == [float("-inf"), 0.0, 0.0]
    torch.testing.assert_close(found, module.reference_statistics(logits, labels, 0))
    lse = found[0] + found[1].log()
    expected = module.reference_gradient(logits, labels, lse, 0, -100)
    module.to_gradient(logits, labels, lse, 0, -100)
    torch.testing.assert_close(logits, expected)
    assert logits[0].tolist() == [0.0, 0.0, 0.0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([0.0, 0.1]))
def test_a_cut_vocabulary_equals_the_whole(sizes: list[int], smoothing: float) -> None:
    against_cut(sizes, torch.float64, smoothing)


def against_cut(sizes: list[int], dtype: torch.dtype, smoothing: float) -> None:
    """Play all ranks one after the other; the exchange of each finds what the others would send."""
    x, weight, labels = inputs(9, 5, sum(sizes), dtype)
    cuts = list(pairwise([0, *accumulate(sizes)]))
    parts = [weight.detach()[a:b].requires_grad_() for a, b in cuts]
    expected = results(reference(x, weight, labels, smoothing=smoothing), x, weight)
    target = target_of(smoothing, sum(sizes))
    hidden_gradient, weight_gradients = torch.zeros_like(expected[1]), []
    for part, (first, _) in zip(parts, cuts, strict=True):
        chunks = iter(range(0, 9, 4))

        def exchange(mine: Tensor, chunks: object = chunks, first: int = first) -> Tensor:
            a = next(chunks)
            logits = [x.detach()[a : a + 4] @ p.detach().T for p in parts]
            everyone = [
                module.reference_statistics(p, labels[a : a + 4], c, target)
                for p, (c, _) in zip(logits, cuts, strict=True)
            ]
            torch.testing.assert_close(everyone[[c for c, _ in cuts].index(first)], mine)
            return combine(torch.stack(everyone))

        with mock.patch.object(module, "chunk_tokens", return_value=4):
            found = loss_and_gradients(x.detach(), part.detach(), labels, -100, len(part), first, exchange, target)
        torch.testing.assert_close(found[0], expected[0].detach())
        hidden_gradient += 0.7 * found[1]
        weight_gradients.append(0.7 * found[2])
    compare((hidden_gradient, torch.cat(weight_gradients)), expected[1:], dtype)


def test_no_chunk_of_logits_is_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    honest = module.statistics_of

    def noted(logits: Tensor, *rest: Any) -> Tensor:
        seen.append(len(logits))
        return honest(logits, *rest)

    monkeypatch.setattr(module, "statistics_of", noted)
    x, weight, labels = inputs(20, 4, 30, torch.float32)
    fused(x, weight, labels, chunk=6)
    assert seen == [6, 6, 6, 2]


def test_the_default_chunk() -> None:
    assert chunk_tokens(16384, 4096, 131072) == 512
    assert chunk_tokens(16384, 4096, 32000) == 2048
    assert chunk_tokens(10, 4096, 32000) == 128
    assert chunk_tokens(16384, 4096, 1) == 16384


def test_all_tokens_ignored_and_none_at_all() -> None:
    x, weight, labels = inputs(6, 4, 5, torch.float32)
    assert [float(t.detach().abs().sum()) for t in results(fused(x, weight, labels.fill_(-100)), x, weight)] == [0] * 3
    nothing = results(fused(x[:0], weight, labels[:0]), x, weight)
    assert [float(t.detach().abs().sum()) for t in nothing] == [0] * 3


def test_what_it_takes_beside_its_results_is_what_it_says() -> None:
    x, weight, labels = (t.detach() for t in inputs(2048, 64, 512, torch.float32))
    with LiveBytes() as live:
        before = live.live
        kept = loss_and_gradients(x, weight, labels, -100, 512)
        results_bytes = live.live - before
    assert results_bytes == 4 + x.nbytes + weight.nbytes
    beside = live.peak - before - results_bytes
    told = working_bytes(2048, 64, 512, torch.float32)
    assert 0.7 * told <= beside <= 1.3 * told, (beside, told)  # statistics and labels are small
    assert len(kept) == 3
    assert working_bytes(2048, 64, 512, torch.bfloat16) > 512 * 64 * 4  # the head's gradient is added up in fp32

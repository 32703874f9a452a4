"""The Triton attention kernels, interpreted, against the plain-PyTorch reference in double precision."""

# pyrefly: ignore-errors[bad-argument-count, bad-argument-type]
from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.errors import Unsupported
from hydragraph.kernels.varlen_attention import attention_backend, reference, varlen_attention
from tests.kernels.interpreter import interpreted
from tests.kernels.test_varlen_attention import bounds, packed, results
from tests.thorough import first, thorough

# Relative error in the 2-norm: of fp32 arithmetic, and of 16-bit inputs to each product.
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

ZERO = 2e-5  # of one token, the gradients of q and k are differences of equal numbers, which are about 10


def compare(
    lengths: list[int],
    heads: tuple[int, int] = (2, 2),
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    scale: float | None = None,
    **options: Any,
) -> None:
    q, k, v, cu_seqlens = packed(lengths, *heads, size)
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = varlen_attention(*inputs, cu_seqlens, causal=causal, scale=scale, backend="triton", **options)
    found = results(out, *inputs)
    expected = results(reference(*wide, cu_seqlens, causal, scale or size**-0.5, **options), *wide)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert a.shape == b.shape
        error, size_of = (float(x.norm()) for x in (a.detach().double() - b.detach(), b.detach()))
        assert error <= BOUND[dtype] * size_of + ZERO, (error, size_of)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "heads", "size", "causal", "scale"),
    [([17, 0, 33], (4, 2), 16, True, None), ([1, 16], (3, 1), 24, False, -0.3)],
)
def test_values_and_gradients(
    lengths: list[int], heads: tuple[int, int], size: int, causal: bool, scale: float | None
) -> None:
    compare(lengths, heads, size, causal=causal, scale=scale)


@thorough
@interpreted
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 40]), min_size=1, max_size=3).filter(any),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    st.sampled_from([16, 24]),
    st.booleans(),
    st.sampled_from([None, 1.0, -0.3]),
)
def test_values_and_gradients_of_any_shapes(
    lengths: list[int], heads: tuple[int, int], size: int, causal: bool, scale: float | None
) -> None:
    compare(lengths, heads, size, causal=causal, scale=scale)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "causal", "window", "chunk", "cap"),
    [([40], True, 17, None, 0.8), ([33, 1], False, 5, None, None), ([40], True, None, 9, None)],
)
def test_windows_chunks_and_caps(
    lengths: list[int], causal: bool, window: int | None, chunk: int | None, cap: float | None
) -> None:
    compare(lengths, (2, 1), 16, causal=causal, window=window, chunk=chunk, cap=cap)


@thorough
@interpreted
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0, 1, 16, 33, 70]), min_size=1, max_size=2).filter(any),
    st.booleans(),
    st.sampled_from([None, 1, 5, 17, 32, 33, 500]),
    st.sampled_from([None, 9, 32]),
    st.sampled_from([None, 0.8]),
)
def test_any_windows_chunks_and_caps(
    lengths: list[int], causal: bool, window: int | None, chunk: int | None, cap: float | None
) -> None:
    compare(lengths, (2, 1), 16, causal=causal, window=window, chunk=chunk, cap=cap)


@interpreted
@pytest.mark.parametrize("dtype", first([torch.bfloat16], [torch.float16, torch.bfloat16]))
def test_sixteen_bits_are_as_good_as_their_inputs(dtype: torch.dtype) -> None:
    compare([33, 0, 1], (2, 1), 32, dtype)


@interpreted
@pytest.mark.parametrize(
    ("size", "dtype"), [(80, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (192, torch.float32)]
)
def test_large_heads_and_those_that_are_no_power_of_two(size: int, dtype: torch.dtype) -> None:
    compare([9, 20], (1, 1), size, dtype)


@interpreted
def test_one_token_attends_to_itself() -> None:
    q, k, v, cu_seqlens = packed([1], heads=4, kv=2, size=16)
    out = varlen_attention(*(x.detach().float() for x in (q, k, v)), cu_seqlens, backend="triton")
    assert torch.equal(out, v.detach().float().repeat_interleave(2, dim=1))


@interpreted
def test_more_sequences_than_one_look_at_the_table_finds() -> None:
    lengths = [0] * 127 + [5, 1, 3]
    q, k, v, _ = (x.detach().float() for x in packed(lengths, 1, 1, 16))
    starts = bounds(lengths, torch.int64)
    found = varlen_attention(q, k, v, starts, backend="triton")
    torch.testing.assert_close(found, reference(q, k, v, starts, True, 0.25))


@interpreted
def test_no_token_at_all() -> None:
    q, k, v, cu_seqlens = packed([0, 0], size=16)
    inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    found = results(varlen_attention(*inputs, cu_seqlens, backend="triton"), *inputs)
    assert [tuple(x.shape) for x in found] == [(0, 2, 16)] * 4


@interpreted
def test_other_sequences_do_not_change_a_single_bit() -> None:
    q, k, v, cu_seqlens = packed([21, 17, 30], size=16)
    plain = [x.detach().float() for x in (q, k, v)]
    others = torch.full((68, 1, 1), float("nan"))
    others[21:38] = 1.0
    want = varlen_attention(*plain, cu_seqlens, backend="triton")[21:38]
    found = varlen_attention(*(x * others for x in plain), cu_seqlens, backend="triton")[21:38]
    assert torch.equal(found, want)


@interpreted
def test_two_runs_agree_to_the_last_bit() -> None:
    first, second = [], []
    for found in (first, second):
        q, k, v, cu_seqlens = packed([20, 13], heads=2, kv=1, size=16)
        inputs = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        found.extend(results(varlen_attention(*inputs, cu_seqlens, backend="triton"), *inputs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@interpreted
@pytest.mark.parametrize("layout", ["fused", "heads first", "spread"])
def test_views(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if layout == "fused":
        q, k, v = torch.randn(25, 3, 2, 16, generator=generator).unbind(1)
    elif layout == "heads first":
        q, k, v = (torch.randn(2, 25, 16, generator=generator).transpose(0, 1) for _ in range(3))
    else:
        q, k, v = (torch.randn(25, 2, 32, generator=generator)[..., ::2] for _ in range(3))
    cu_seqlens = bounds([4, 21])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = results(varlen_attention(*inputs, cu_seqlens, backend="triton"), *inputs)
    for a, b in zip(found, results(reference(*wide, cu_seqlens, True, 0.25), *wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@interpreted
def test_scores_beyond_exponents_stay_finite() -> None:
    q, k, v, cu_seqlens = packed([5, 33], size=16)
    inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    for scale in (300.0, -300.0):
        found = results(varlen_attention(*inputs, cu_seqlens, causal=False, scale=scale, backend="triton"), *inputs)
        assert all(bool(x.isfinite().all()) for x in found)


@interpreted
def test_what_one_backend_computed_another_differentiates() -> None:
    q, k, v, cu_seqlens = packed([7, 20], heads=4, kv=2, size=16)
    inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = results(varlen_attention(*inputs, cu_seqlens, backend="loop"), *inputs)
    out = varlen_attention(*inputs, cu_seqlens, backend="loop")
    with attention_backend("triton"):
        found = results(out, *inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "Triton did not run"


@interpreted
def test_heads_without_a_kernel_are_refused() -> None:
    small = [torch.zeros(3, 2, 8)] * 3
    with pytest.raises(
        Unsupported, match=r"triton: no kernel for torch.float32 heads of size 8: the size must be 16 to"
    ):
        varlen_attention(*small, bounds([3]), backend="triton")
    double = [torch.zeros(3, 2, 16, dtype=torch.float64)] * 3
    with pytest.raises(Unsupported, match=r"triton: no kernel for torch.float64"):
        varlen_attention(*double, bounds([3]), backend="triton")

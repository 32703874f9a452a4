"""Attention over packed sequences against the plain-PyTorch reference in double precision."""

# pyrefly: ignore-errors[bad-argument-count, bad-argument-type]
from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.varlen_attention import reference, varlen_attention
from tests.thorough import only

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def packed(lengths: list[int], heads: int = 2, kv: int = 2, size: int = 8, seed: int = 0) -> Inputs:
    """Return fp64 leaves q, k, v of the given lengths, and their bounds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), h, size) for h in (heads, kv, kv)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return q, k, v, bounds(lengths)


def results(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the output and the gradients of a fixed weighted sum of it."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return (out, *torch.autograd.grad((out * weights).sum(), leaves))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([4, 8, 10]),
    st.booleans(),
    st.sampled_from([None, 1.0, 0.3]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_values_and_gradients_equal_the_reference(
    lengths: list[int], heads: tuple[int, int], size: int, causal: bool, scale: float | None, dtype: torch.dtype
) -> None:
    q, k, v, _ = packed(lengths, *heads, size)
    cu_seqlens = bounds(lengths, dtype)
    found = results(varlen_attention(q, k, v, cu_seqlens, causal=causal, scale=scale), q, k, v)
    expected = results(reference(q, k, v, cu_seqlens, causal, scale or size**-0.5), q, k, v)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


LIMITS = st.sampled_from([None, 1, 3, 8])


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.booleans(),
    LIMITS,
    LIMITS,
    st.sampled_from([None, 0.7]),
    st.booleans(),
)
def test_windows_chunks_caps_and_sinks_equal_the_reference(
    lengths: list[int],
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    chunk: int | None,
    cap: float | None,
    with_sink: bool,
) -> None:
    q, k, v, cu_seqlens = packed(lengths, *heads)
    sink = torch.linspace(-1, 1, heads[0], dtype=torch.float64).requires_grad_() if with_sink else None
    leaves = (q, k, v) if sink is None else (q, k, v, sink)
    ours = varlen_attention(q, k, v, cu_seqlens, causal=causal, window=window, chunk=chunk, cap=cap, sink=sink)
    other = reference(q, k, v, cu_seqlens, causal, 8**-0.5, window, chunk, cap, sink)
    for a, b in zip(results(ours, *leaves), results(other, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_window_as_long_as_the_sequences_is_none() -> None:
    q, k, v, cu_seqlens = packed([5, 9, 1])
    plain = results(varlen_attention(q, k, v, cu_seqlens), q, k, v)
    for changes in ({"window": 9}, {"chunk": 9}):
        found = results(varlen_attention(q, k, v, cu_seqlens, **changes), q, k, v)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_chunks_are_sequences_that_were_cut() -> None:
    q, k, v, cu_seqlens = packed([5, 9, 1])
    found = results(varlen_attention(q, k, v, cu_seqlens, chunk=4), q, k, v)
    cut = results(varlen_attention(q, k, v, bounds([4, 1, 4, 4, 1, 1])), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, cut, strict=True))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v, cu_seqlens = packed([5, 3])
    sink = torch.full((2,), float("-inf"), dtype=torch.float64, requires_grad=True)
    found = results(varlen_attention(q, k, v, cu_seqlens, sink=sink), q, k, v, sink)
    assert bool((found[4] == 0).all())
    for a, b in zip(found[:4], results(varlen_attention(q, k, v, cu_seqlens), q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "varlen_attention: 'window' is 0; pass a positive number, or None"),
        ({"chunk": -1}, "'chunk' is -1"),
        ({"cap": 0.0}, "'cap' is 0.0"),
        ({"sink": torch.zeros(3)}, r"sink of shape \[3\] for 2 query heads; pass one number per query head, \[Hq\]"),
    ],
)
def test_options_that_are_refused(changes: dict[str, Any], message: str) -> None:
    q, k, v, cu_seqlens = packed([3])
    with pytest.raises(Unsupported, match=message):
        varlen_attention(q, k, v, cu_seqlens, **changes)


def test_one_token_attends_to_itself() -> None:
    q, k, v, cu_seqlens = packed([1], heads=4, kv=2)
    assert torch.equal(varlen_attention(q, k, v, cu_seqlens), v.repeat_interleave(2, dim=1))


def test_empty_sequences_change_nothing() -> None:
    q, k, v, cu_seqlens = packed([3, 4])
    want = varlen_attention(q, k, v, cu_seqlens)
    assert torch.equal(varlen_attention(q, k, v, bounds([0, 3, 0, 0, 4, 0])), want)


def test_other_sequences_do_not_change_a_single_bit() -> None:
    q, k, v, cu_seqlens = packed([5, 3, 4])
    want = varlen_attention(q, k, v, cu_seqlens)[5:8]
    others = torch.ones(12, 1, 1, dtype=torch.float64)
    others[:5], others[8:] = 1e3, -1e3
    assert torch.equal(varlen_attention(q * others, k * others, v * others, cu_seqlens)[5:8], want)
    _, *gradients = results(torch.cat([want * 0, want]), q, k, v)
    for gradient in gradients:
        assert bool((gradient[:5] == 0).all())
        assert bool((gradient[8:] == 0).all())


def test_views_of_one_fused_product() -> None:
    fused = torch.randn(7, 3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = fused.unbind(1)
    assert not q.is_contiguous()
    cu_seqlens = bounds([4, 3])
    found = varlen_attention(q, k, v, cu_seqlens)
    torch.testing.assert_close(found, reference(q, k, v, cu_seqlens, True, 8**-0.5))
    assert found.is_contiguous()


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"cap": 2.0}])
def test_heads_whose_elements_are_apart(options: dict[str, Any]) -> None:
    q, k, v, cu_seqlens = packed([9, 4])
    apart = [x.detach().mT.contiguous().requires_grad_() for x in (q, k, v)]
    found = results(varlen_attention(*(x.mT for x in apart), cu_seqlens, **options), *apart)
    expected = results(varlen_attention(q, k, v, cu_seqlens, **options), q, k, v)
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one.mT, other)


@pytest.mark.parametrize("kv", [1, 4])
def test_bfloat16_is_as_good_as_its_inputs(kv: int) -> None:
    q, k, v, cu_seqlens = packed([9, 1, 20], heads=4, kv=kv, size=16)
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in half]
    found = results(varlen_attention(*half, cu_seqlens), *half)
    expected = results(reference(*wide, cu_seqlens, True, 0.25), *wide)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < 2e-2


def test_values_of_another_size_are_refused_on_every_device() -> None:
    q, k, v, cu_seqlens = packed([3], heads=4, kv=4)
    message = r"varlen_attention: q, k, v of shapes \[3, 4, 8\], \[3, 4, 8\], \[3, 4, 6\]; pass .*; pad narrower values"
    for device in ("cpu", "meta"):
        with pytest.raises(Unsupported, match=message):
            varlen_attention(*(x.to(device) for x in (q, k, v[..., :6], cu_seqlens)))


def test_heads_that_are_no_multiple_are_refused() -> None:
    q, k, v, cu_seqlens = packed([3], heads=4, kv=3)
    with pytest.raises(Unsupported, match="varlen_attention: 4 query heads over 3 key/value heads; use a query head"):
        varlen_attention(q, k, v, cu_seqlens)


@only("2")
@pytest.mark.parametrize("kv", [1, 2])
def test_the_operators_keep_pytorchs_rules(kv: int) -> None:
    q, k, v, cu_seqlens = packed([3, 0, 4], kv=kv)
    longest = torch.tensor(4)
    torch.library.opcheck(torch.ops.hydragraph.varlen_attention.default, (q, k, v, cu_seqlens, longest, True, 0.3))
    options = (3, 2, 1.5, torch.zeros(2, dtype=torch.float64, requires_grad=True))
    torch.library.opcheck(
        torch.ops.hydragraph.varlen_attention.default, (q, k, v, cu_seqlens, longest, True, 0.3, *options)
    )
    plain = [x.detach() for x in (q, k, v)]
    out, lse = torch.ops.hydragraph.varlen_attention(*plain, cu_seqlens, longest, True, 0.3)
    torch.library.opcheck(
        torch.ops.hydragraph.varlen_attention_backward.default,
        (torch.ones_like(out), *plain, out, lse, cu_seqlens, longest, True, 0.3),
        test_utils=("test_schema", "test_faketensor"),
    )

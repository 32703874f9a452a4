"""Attention with dropout of its probabilities: values, gradients, and equal masks for any packing or part of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydragraph import Unsupported
from hydragraph.kernels.attention_dropout import kept_of
from hydragraph.kernels.philox import call_word, keys_of
from hydragraph.kernels.varlen_attention import reference

BLOCK = torch.tensor(3)
LENGTHS = [4, 7]
KEYS = keys_of(11, LENGTHS, [1, 0])
LONGEST = torch.tensor(7)


def attend(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool = True, keys: Tensor = KEYS) -> Tensor:
    bounds = torch.tensor([0, 4, 11], dtype=torch.int32)
    options = (bounds, LONGEST, causal, 0.3, keys, BLOCK, None, p, 2, 1)
    result: Tensor = torch.ops.hydragraph.attention_dropout(q, k, v, *options)
    return result


def qkv(heads: int = 4, shared: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, heads, size), (11, shared, size), (11, shared, size))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
def test_values_are_those_of_a_masked_softmax(causal: bool) -> None:
    q, k, v = qkv()
    out = attend(q, k, v, 0.4, causal)
    for a, b in ((0, 4), (4, 11)):
        factor = kept_of(KEYS[0, a:b], torch.arange(4), b - a, call_word(3, 2), 0.4).double()
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b].repeat_interleave(2, 1)) * 0.3
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), float("-inf"))
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1) * factor, v[a:b].repeat_interleave(2, 1))
        torch.testing.assert_close(out[a:b], want, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, 0.4), qkv(2, 1, size=2))


def test_p_0_and_an_evaluation_are_plain_attention() -> None:
    q, k, v = (x.detach() for x in qkv())
    want = reference(q, k, v, torch.tensor([0, 4, 11]), True, 0.3)
    torch.testing.assert_close(attend(q, k, v, 0.0), want)
    torch.testing.assert_close(attend(q, k, v, 0.5, keys=keys_of(11, LENGTHS, [-1, -1])), want)


def test_some_heads_and_one_sequence_have_their_part_of_the_mask() -> None:
    q, k, v = (x.detach() for x in qkv())
    whole = attend(q, k, v, 0.4)
    bounds = torch.tensor([0, 7], dtype=torch.int32)
    own = (bounds, LONGEST, True, 0.3, keys_of(11, [7], [0]), BLOCK, torch.tensor(16), 0.4, 2, 8)
    part = torch.ops.hydragraph.attention_dropout(q[4:, 2:], k[4:, 1:], v[4:, 1:], *own)
    torch.testing.assert_close(part, whole[4:, 2:], rtol=1e-12, atol=1e-12)


def test_more_heads_than_a_mask_numbers_are_refused() -> None:
    with pytest.raises(Unsupported, match="attention dropout over 7 tokens in head 1024 exceeds 16 million"):
        kept_of(KEYS[0], torch.tensor([1024]), 7, 0, 0.1)

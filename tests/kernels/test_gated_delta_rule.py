"""The gated delta rule in chunks equals its recurrence, sequence by sequence, and so do gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydragraph.kernels import gated_delta_rule

HEADS, KEYS, SIZE, VALUE = 4, 2, 8, 6


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v, g and beta of random tokens."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(tokens, KEYS, SIZE, generator=generator) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE, generator=generator)
    g, beta = -torch.rand(tokens, HEADS, generator=generator), torch.rand(tokens, HEADS, generator=generator)
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute one sequence token by token, head by head, as the definition says."""
    rows = []
    states = [v.new_zeros(SIZE, VALUE) for _ in range(HEADS)]
    for t in range(len(q)):
        for head in range(HEADS):
            key, query = (gated_delta_rule.unit(x[t, head // (HEADS // KEYS)]) for x in (k, q))
            decayed = g[t, head].exp() * states[head]
            states[head] = decayed + key.outer(beta[t, head] * (v[t, head] - decayed.T @ key))
            rows.append(states[head].T @ query / SIZE**0.5)
    return torch.stack(rows).reshape(v.shape)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 70], [64, 3], [129]], ids=str)
def test_chunks_compute_the_recurrence_of_each_sequence(lengths: list[int]) -> None:
    given = [x.requires_grad_() for x in inputs(sum(lengths))]
    weight = torch.randn(sum(lengths), HEADS, VALUE, dtype=torch.float64)
    expected = torch.cat([recurrence(*parts) for parts in zip(*(x.split(lengths) for x in given), strict=True)])
    wanted = torch.autograd.grad((expected * weight).sum(), given)
    q, k, v, g, beta = given
    found = torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds(lengths), g, beta)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for one, other in zip(torch.autograd.grad((found * weight).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_the_operator_obeys_pytorchs_rules() -> None:
    q, k, v, g, beta = (x.requires_grad_() for x in inputs(7))
    torch.library.opcheck(torch.ops.hydragraph.gated_delta_rule.default, (q, k, v, bounds([3, 4]), g, beta))


def test_16_bits_are_computed_in_32() -> None:
    *exact, g, beta = inputs(90, torch.float32)
    q, k, v = (x.bfloat16() for x in exact)
    found = torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds([90]), g, beta)
    assert found.dtype is torch.bfloat16
    wide = torch.ops.hydragraph.gated_delta_rule(q.float(), k.float(), v.float(), bounds([90]), g, beta)
    torch.testing.assert_close(found, wide.bfloat16())


def test_transformers_computes_the_same_of_one_sequence() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(modeling, "torch_chunk_gated_delta_rule"):
        pytest.skip("this transformers has no such function")
    q, k, v, g, beta = inputs(100, torch.float32)
    wanted, _ = modeling.torch_chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v)), g=g[None], beta=beta[None], use_qk_l2norm_in_kernel=True
    )
    found = torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds([100]), g, beta)
    torch.testing.assert_close(found[None], wanted, rtol=1e-4, atol=1e-5)

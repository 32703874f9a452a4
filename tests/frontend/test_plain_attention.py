"""Attention of PyTorch's own over a row is computed within each packed sequence, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.capture import capture
from tests.frontend.execute import batch, loss
from tests.models import randomised

WIDTH, LAYERS = 32, 1
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A transformer layer of one sequence, which takes its hidden state alone."""

    def __init__(self, attend: Attend, kv: int) -> None:
        super().__init__()
        self.attend, self.kv = attend, kv
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * kv * 8)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm(x)).split([WIDTH, self.kv * 8, self.kv * 8], dim=-1)
        q, k, v = (part.view(batch, tokens, -1, 8).transpose(1, 2) for part in parts)
        y = self.attend(q, k, v)
        return x + self.out(y.transpose(1, 2).contiguous().view(batch, tokens, WIDTH))


class Plain(nn.Module):
    """A language model of one sequence: it knows no packing at all."""

    def __init__(self, attend: Attend, kv: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(101, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Layer(attend, kv) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 101)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fewer_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)


def without_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0])[None]


@functools.cache
def captured() -> tuple[hg.Program, Plain]:
    """Return a model with causal attention and its program, which the numeric check has passed."""
    model: Plain = randomised(Plain(causal))  # pyrefly: ignore[bad-assignment]
    return hg.capture(model, check="full"), model


@pytest.mark.parametrize(("attend", "kv"), [(causal, 4), (fewer_keys, 2), (without_batch, 4)])
def test_a_model_of_one_sequence_computes_the_same_of_packed_ones(attend: Attend, kv: int) -> None:
    plain = randomised(Plain(attend, kv))
    program, plain = captured() if attend is causal else (capture(plain), plain)
    given, alone = batch([5, 3, 9]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = plain(given["input_ids"][:, a:b])[0]
        alone = alone + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    packed, parameters = loss(program, plain, given), list(plain.parameters())
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)
    found, expected = (torch.autograd.grad(x, parameters) for x in (packed, alone))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


@pytest.mark.parametrize("attend", [masked, dropping])
def test_attention_with_a_mask_or_dropout_is_refused(attend: Attend) -> None:
    with pytest.raises(
        hg.Unsupported, match=r"layer.0: packed sequences would attend .* in aten.scaled_dot_product_attention"
    ):
        capture(Plain(attend))


def test_heads_of_such_attention_are_cut() -> None:
    rule = captured()[0].parameters["layers.0.qkv.weight"].rule
    assert rule is not None
    assert rule.heads


def test_the_numeric_check_passes() -> None:
    assert captured()[0].layers == LAYERS

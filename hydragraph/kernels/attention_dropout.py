"""Attention over packed sequences with dropout of attention probabilities, in plain PyTorch.

Masks are drawn as in `hydragraph.kernels.dropout`: queries are tokens, and (head, key position) pairs are features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.attention_backends import spans
from hydragraph.kernels.new_tensors import contiguous_like, widened
from hydragraph.kernels.philox import call_word, threshold, words

# Bits of a feature index that store the key position
_POSITIONS = 24


def kept_of(keys: Tensor, heads: Tensor, length: int, call: int, p: float) -> Tensor:
    """Return each probability's factor, [heads, L, length] fp32: 0 if dropped, 1 / (1 - p) if kept, 1 without dropout.

    Args:
        keys: dropout keys of L queries, [L, 2].
        heads: ascending head indices, [heads] int64.
    """
    if length > 1 << _POSITIONS or int(heads[-1]) >= 1 << 10:
        raise Unsupported(
            f"attention dropout over {length} tokens in head {int(heads[-1])} exceeds 16 million tokens or 1024 heads",
            where="varlen_attention",
            remedy="set the config's attention dropout to 0, or truncate sequences",
        )
    # Feature: the head in the high bits, the key's position in the low 24 bits.
    features = ((heads << _POSITIONS)[:, None] + torch.arange(length, device=heads.device)).flatten()
    kept = words(keys, features, call).view(len(keys), len(heads), length).transpose(0, 1) >= threshold(p)
    factor = kept.float() * (1 / (1 - p) if p < 1 else 0.0)
    return torch.where(keys[:, 1:] < 0, 1.0, factor)


@dataclass(frozen=True)
class _Head:
    """A head of a sequence of L tokens; `softmax` and `factor` are [L, L]."""

    rows: slice
    query: int
    key: int
    softmax: Tensor
    factor: Tensor


def _heads(
    q: Tensor, k: Tensor, bounds: Tensor, causal: bool, scale: float, keys: Tensor, first: int, call: int, p: float
) -> Iterator[_Head]:
    group = q.shape[1] // k.shape[1]
    for a, b in spans(bounds):
        later = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1) if causal else None
        for head in range(q.shape[1]):
            scores = q[a:b, head] @ k[a:b, head // group].T * scale
            if later is not None:
                scores = scores.masked_fill(later, float("-inf"))
            numbers = torch.tensor([first + head], device=q.device)
            factor = kept_of(keys[0, a:b], numbers, b - a, call, p)[0].to(scores.dtype)
            yield _Head(slice(a, b), head, head // group, scores.softmax(-1), factor)


@torch.library.custom_op("hydragraph::attention_dropout", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: Tensor, causal: bool, scale: float,
    keys: Tensor | None, block: Tensor | None, first: Tensor | None, p: float, call: int, unit: int,
) -> Tensor:  # fmt: skip
    """Compute attention with dropout; `keys`, `block` and `call` are as in `hydragraph::dropout`.

    Args:
        first: this rank's first head, times `unit`, 0-d int64 on the CPU; None: all heads.
    """
    if keys is None or block is None:
        raise AssertionError("hydragraph::attention_dropout needs dropout keys, except while tracing")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    values = widened(v)
    place = (keys, 0 if first is None else int(first) // unit, call_word(int(block), call), p)
    for head in _heads(widened(q), widened(k), cu_seqlens, causal, scale, *place):
        out[head.rows, head.query] = ((head.softmax * head.factor) @ values[head.rows, head.key]).to(q.dtype)
    return out


@torch.library.custom_op("hydragraph::attention_dropout_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float,
    keys: Tensor, block: Tensor, first: Tensor | None, p: float, call: int, unit: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # With S the softmax and M the mask: out = (S M) v, dS = (dout v^T) M, dscores = S (dS - rowsum(S dS)).
    wide = [widened(x) for x in (q, k, v, grad)]
    queries, inner, values, grads = wide
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wide[:3])
    place = (keys, 0 if first is None else int(first) // unit, call_word(int(block), call), p)
    for head in _heads(queries, inner, cu_seqlens, causal, scale, *place):
        rows = head.rows
        dout = grads[rows, head.query]
        dv[rows, head.key] += (head.softmax * head.factor).T @ dout
        ds = (dout @ values[rows, head.key].T) * head.factor
        ds = head.softmax * (ds - (head.softmax * ds).sum(-1, keepdim=True)) * scale
        dq[rows, head.query] = ds @ inner[rows, head.key]
        dk[rows, head.key] += ds.T @ queries[rows, head.query]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, bounds, _, ctx.causal, ctx.scale, keys, block, first, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, bounds, keys, block, first)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, bounds, keys, block, first = ctx.saved_tensors
    arguments = (grad, q, k, v, bounds, ctx.causal, ctx.scale, keys, block, first, *ctx.options)
    return *torch.ops.hydragraph.attention_dropout_backward(*arguments), *(None,) * 10


_forward.register_fake(lambda q, *_, **__: contiguous_like(q)[0])
_backward.register_fake(lambda grad, q, k, v, *_, **__: contiguous_like(q, k, v))
_forward.register_autograd(_differentiate, setup_context=_save)

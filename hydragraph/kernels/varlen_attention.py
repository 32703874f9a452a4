"""Attention over packed sequences: the one operator that mixes tokens, so that packing can never leak between them.

Shapes: T packed tokens of N sequences, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D the head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from hydragraph.errors import Unsupported

aten = torch.ops.aten


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    max_length: Tensor | None = None,
) -> Tensor:
    """Attend within each packed sequence; what an own `nn.Module` calls to be trained by hydragraph.

    Args:
        q: [T, Hq, D]. k, v: [T, Hk, D].
        cu_seqlens: [N + 1] int32 or int64, where each sequence starts, then T.
        causal: a token sees itself and what came before it; otherwise its whole sequence.
        scale: of the scores; default 1 / sqrt(D).
        max_length: 0-d int64 on the CPU, the longest sequence (a run-time value; only GPU kernels read it).

    Returns:
        [T, Hq, D].
    """
    if q.shape[1] % k.shape[1]:
        raise Unsupported(
            f"{q.shape[1]} query heads over {k.shape[1]} key/value heads",
            where="varlen_attention",
            remedy="use a query head count that is a multiple of the key/value head count",
        )
    if max_length is None:
        max_length = torch.zeros((), dtype=torch.int64)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = torch.ops.hydragraph.varlen_attention(q, k, v, cu_seqlens, max_length, causal, scale)
    return out  # type: ignore[no-any-return]


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float) -> Tensor:
    """Say in plain PyTorch what the operator computes, [T, Hq, D] in the dtype of q: one softmax per sequence."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for a, b in _spans(cu_seqlens):
        keys, values = (x[a:b].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), float("-inf"))
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def _spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    bounds = cu_seqlens.tolist()
    return ((a, b) for a, b in pairwise(bounds) if b > a)


def _heads_first(x: Tensor, group: int = 1) -> Tensor:
    """[L, H, D] -> [1, H * group, L, D], as PyTorch's attention kernels want it."""
    x = x.transpose(0, 1)[None]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _tokens_first(x: Tensor, group: int = 1) -> Tensor:
    """[1, H * group, L, D] -> [L, H, D], adding up the heads that share one key/value head."""
    x = x[0].transpose(0, 1)
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)


def _wide(q: Tensor) -> torch.dtype:
    """The dtype of log-sum-exp: fp32, or fp64 where q is."""
    return torch.promote_types(q.dtype, torch.float32)


def _require_cpu(q: Tensor) -> None:
    if q.device.type != "cpu":
        raise Unsupported(
            f"no kernel for device {q.device}", where="varlen_attention", remedy="compile with device='cpu' for now"
        )


@torch.library.custom_op("hydragraph::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _require_cpu(q)
    group = q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=_wide(q))
    for a, b in _spans(cu_seqlens):
        o, s = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q[a:b]), _heads_first(k[a:b], group), _heads_first(v[a:b], group), 0.0, causal, scale=scale
        )
        out[a:b], lse[a:b] = _tokens_first(o), s[0].transpose(0, 1)
    return out, lse


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty((q.shape[0], q.shape[1]), dtype=_wide(q)),
    )


@torch.library.custom_op("hydragraph::varlen_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_length: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_cpu(q)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for a, b in _spans(cu_seqlens):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[a:b]),
            _heads_first(q[a:b]),
            _heads_first(k[a:b], group),
            _heads_first(v[a:b], group),
            _heads_first(out[a:b]),
            lse[a:b].transpose(0, 1)[None],
            0.0,
            causal,
            scale=scale,
        )
        dq[a:b], dk[a:b], dv[a:b] = (_tokens_first(x, g) for x, g in zip(found, (1, group, group), strict=True))
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_length: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:  # type: ignore[type-arg]
    q, k, v, cu_seqlens, max_length, ctx.causal, ctx.scale = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, max_length)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    found = torch.ops.hydragraph.varlen_attention_backward(grad, *saved, ctx.causal, ctx.scale)  # type: ignore[attr-defined]
    return (*found, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)

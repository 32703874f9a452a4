"""Attention over packed sequences: the only operator that mixes tokens, so that packing cannot leak between sequences.

Shapes: T packed tokens of N sequences, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D the head size.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.attention_backends import attention_backend, choose, forced, spans
from hydragraph.kernels.triton_jit import require_one_device

__all__ = ["attention_backend", "reference", "varlen_attention"]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    max_length: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention within each packed sequence; custom modules call this to be trainable by hydragraph.

    Args:
        q: [T, Hq, D]. k, v: [T, Hk, D].
            All three of one dtype.
        cu_seqlens: [N + 1] int32 or int64, the start of each sequence, then T.
        causal: a token attends to itself and to earlier ones; otherwise to its whole sequence.
        scale: scale of the scores; default 1 / sqrt(D).
        max_length: 0-d int64 on the CPU, the longest sequence (a run-time value; only GPU kernels read it).
        backend: "flash_attn", "torch", "triton" or "loop"; default the first that accepts the tensors. Like `with
            attention_backend(...)`, it applies where the operator runs: a captured graph does not record it.

    Returns:
        [T, Hq, D].
    """
    if q.shape[1] % k.shape[1]:
        raise Unsupported(
            f"{q.shape[1]} query heads over {k.shape[1]} key/value heads",
            where="varlen_attention",
            remedy="use a query head count that is a multiple of the key/value head count",
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise Unsupported(
            f"q of {q.dtype}, k of {k.dtype} and v of {v.dtype}",
            where="varlen_attention",
            remedy="cast them to one dtype before the call",
        )
    if max_length is None:
        max_length = torch.zeros((), dtype=torch.int64)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with attention_backend(backend) if backend else nullcontext():
        out, _ = torch.ops.hydragraph.varlen_attention(q, k, v, cu_seqlens, max_length, causal, scale)
    return out  # type: ignore[no-any-return]


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float) -> Tensor:
    """Reference in plain PyTorch, [T, Hq, D] in the dtype of q: one softmax per sequence."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for a, b in spans(cu_seqlens):
        keys, values = (x[a:b].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), float("-inf"))
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def _wide(q: Tensor) -> torch.dtype:
    """Return the dtype of log-sum-exp: fp32, or fp64 if q is fp64."""
    return torch.promote_types(q.dtype, torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    if not (q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]):
        raise Unsupported(
            f"q, k, v of shapes {shapes}", where="varlen_attention", remedy="pass [T, Hq, D], [T, Hk, D], [T, Hk, D]"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 1:
        raise Unsupported(
            f"cu_seqlens of shape {list(cu_seqlens.shape)} and {cu_seqlens.dtype}",
            where="varlen_attention",
            remedy="pass [N + 1] int32 or int64: where each sequence starts, then the number of tokens",
        )
    require_one_device("varlen_attention", {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens})


@torch.library.custom_op("hydragraph::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, cu_seqlens)
    return choose(q, k, v).forward(q, k, v, cu_seqlens, max_length, causal, scale)


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
    return choose(q, k, v).backward(grad, (q, k, v, out, lse), cu_seqlens, max_length, causal, scale)


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
    ctx.backend = forced()  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    chosen = forced() or ctx.backend  # type: ignore[attr-defined]
    with attention_backend(chosen):
        gradients = torch.ops.hydragraph.varlen_attention_backward(grad, *saved, ctx.causal, ctx.scale)  # type: ignore[attr-defined]
    return (*gradients, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)

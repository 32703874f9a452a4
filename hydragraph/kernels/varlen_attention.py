"""Attention over packed sequences, as one operator with several backends.

Shapes: T packed tokens of N sequences, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D the head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.attention_backends import AttentionCall, attention_backend, choose, forced, spans
from hydragraph.kernels.attention_settings import AttentionSettings, cut_at_multiples, visible
from hydragraph.kernels.new_tensors import contiguous_like, wide_dtype
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
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention within each packed sequence; hydragraph can train custom modules that call this function.

    Args:
        q: [T, Hq, D].
        k, v: [T, Hk, D], of the same dtype as q.
        cu_seqlens: [N + 1] int32 or int64, the start of each sequence, then T.
        causal: whether a token attends only to itself and earlier tokens, not to all tokens of its sequence.
        scale: scale of the scores; default 1 / sqrt(D).
        max_length: length of the longest sequence, 0-d int64 on the CPU, for GPU kernels.
        window: token i attends only to tokens j with |i - j| < window.
        chunk: a token attends only within its chunk of `chunk` tokens.
        cap: scores s become cap * tanh(s / cap).
        sink: [Hq], an additional score per head in the softmax, without a value vector.
        backend: "flash_attn", "torch", "triton" or "loop"; default: the first that accepts the tensors. Captured graphs
            do not record it.

    Returns:
        [T, Hq, D].
    """
    _check_heads(q, k, v)
    if q.shape[1] % k.shape[1]:
        raise _refused(
            f"{q.shape[1]} query heads over {k.shape[1]} key/value heads",
            "use a query head count that is a multiple of the key/value head count",
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise _refused(f"q of {q.dtype}, k of {k.dtype} and v of {v.dtype}", "cast all three to one dtype")
    _check_options(q, window, chunk, cap, sink)
    if max_length is None:
        max_length = torch.zeros((), dtype=torch.int64)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with attention_backend(backend) if backend else nullcontext():
        outputs: tuple[Tensor, Tensor] = torch.ops.hydragraph.varlen_attention(
            q, k, v, cu_seqlens, max_length, causal, scale, window, chunk, cap, sink
        )
    return outputs[0]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for a, b in spans(cu_seqlens):
        keys, values = (x[a:b].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(b - a)
        seen = visible(places, places, AttentionSettings(causal, scale, window))
        if chunk is not None:
            seen &= places[:, None] // chunk == places // chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if sink is not None:
            scores = torch.cat([scores, sink.to(q.dtype)[:, None, None].expand(-1, b - a, 1)], dim=-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : b - a], values)
    return out


def _refused(what: str, remedy: str) -> Unsupported:
    return Unsupported(what, where="varlen_attention", remedy=remedy)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dim() == k.dim() == v.dim() == 3 and k.shape[1:] == v.shape[1:] and q.shape[2] == k.shape[2]):
        shapes = ", ".join(f"[{', '.join(map(str, x.shape))}]" for x in (q, k, v))
        raise _refused(f"q, k, v of shapes {shapes}", "pass [T, Hq, D], [T, Hk, D], [T, Hk, D]; pad narrower values")


def _check_options(q: Tensor, window: int | None, chunk: int | None, cap: float | None, sink: Tensor | None) -> None:
    for name, value in (("window", window), ("chunk", chunk), ("cap", cap)):
        if value is not None and value <= 0:
            raise _refused(f"{name!r} is {value}", "pass a positive number, or None")
    if sink is not None and (sink.dim() != 1 or sink.shape[0] != q.shape[1]):
        raise _refused(
            f"sink of shape {list(sink.shape)} for {q.shape[1]} query heads", "pass one number per query head, [Hq]"
        )


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sink: Tensor | None) -> None:
    if not len(q) == len(k) == len(v):
        raise _refused(f"q, k, v of {len(q)}, {len(k)} and {len(v)} tokens", "pass [T, Hq, D], [T, Hk, D], [T, Hk, D]")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 1:
        raise _refused(
            f"cu_seqlens of shape {list(cu_seqlens.shape)} and {cu_seqlens.dtype}",
            "pass an int32 or int64 tensor [N + 1]: the start of each sequence, then the number of tokens",
        )
    sinks = {} if sink is None else {"sink": sink}
    require_one_device("varlen_attention", {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, **sinks})


def _call(
    starts: Tensor, longest: Tensor, tokens: int, settings: AttentionSettings, chunk: int | None
) -> AttentionCall:
    if chunk is None:
        return AttentionCall(starts, longest, settings)
    return AttentionCall(cut_at_multiples(starts, tokens, chunk), longest.clamp(max=chunk), settings)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    # Backward kernels recompute p = exp(s - lse) and rowsum(out * grad), which must include the sink.
    mass = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * (lse - mass).exp()[..., None]).to(out.dtype), mass


@torch.library.custom_op("hydragraph::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: Tensor, causal: bool, scale: float,
    window: int | None = None, chunk: int | None = None, cap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, cu_seqlens, sink)
    settings = AttentionSettings(causal, scale, window, cap)
    call = _call(cu_seqlens, max_length, q.shape[0], settings, chunk)
    out, lse = choose(q, k, v, settings).forward(q, k, v, call)
    return (out, lse) if sink is None else _with_sink(out, lse, sink)


@torch.library.custom_op("hydragraph::varlen_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_length: Tensor, causal: bool, scale: float,
    window: int | None = None, chunk: int | None = None, cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    settings = AttentionSettings(causal, scale, window, cap)
    call = _call(cu_seqlens, max_length, q.shape[0], settings, chunk)
    return choose(q, k, v, settings).backward(grad, (q, k, v, out, lse), call)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, max_length, *settings, sink = inputs
    ctx.settings = settings
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, max_length, *(() if sink is None else (sink,)))
    ctx.mark_non_differentiable(output[1])
    ctx.backend = forced()


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens, max_length, *sinks = ctx.saved_tensors
    # The backward may run outside the context that forced the backend.
    with attention_backend(forced() or ctx.backend):
        gradients = torch.ops.hydragraph.varlen_attention_backward(
            grad, q, k, v, out, lse, cu_seqlens, max_length, *ctx.settings
        )
    of_sink = _sink_gradient(grad, out, lse, sinks[0]) if sinks else None
    return (*gradients, *(None,) * (2 + len(ctx.settings)), of_sink)


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the sink's gradient [Hq]: minus the tokens' sum of exp(sink - lse) (grad . out)."""
    share = (sink.to(lse.dtype) - lse).exp()
    return -(share * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sink.dtype)


_forward.register_fake(lambda q, *_, **__: (*contiguous_like(q), q.new_empty(q.shape[:2], dtype=wide_dtype(q.dtype))))
_backward.register_fake(lambda grad, q, k, v, *_, **__: contiguous_like(q, k, v))
_forward.register_autograd(_differentiate, setup_context=_save)

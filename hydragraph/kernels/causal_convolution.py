"""Short causal convolution of each channel over the last K tokens, within packed sequences.

y_t = bias + sum_j weight_{K - 1 - j} x_{t - j},      j = 0 ... K - 1, while t - j is in the same sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hydragraph.kernels.new_tensors import contiguous_like


def _reached(tokens: int, taps: int, cu_seqlens: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield every j with a mask [T - j, 1] of the tokens t whose sequence contains t - j."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    # starts [T]: start of each token's sequence.
    starts = bounds[(torch.searchsorted(bounds, places, right=True) - 1).clamp(min=0)]
    for back in range(min(taps, tokens)):
        yield back, (places - back >= starts)[back:, None]


@torch.library.custom_op("hydragraph::causal_convolution", mutates_args=())
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Convolve each channel within each sequence; return [T, C].

    Args:
        x: [T, C], T tokens of C channels.
        weight: [C, K]; its last column multiplies the token itself.
        bias: [C].
        cu_seqlens: [N + 1].
    """
    tokens, taps = x.shape[0], weight.shape[1]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for back, inside in _reached(tokens, taps, cu_seqlens):
        out[back:] += torch.where(inside, x[: tokens - back] * weight[:, taps - 1 - back], 0.0)
    return out if bias is None else out + bias


@torch.library.custom_op("hydragraph::causal_convolution_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    tokens, taps = x.shape[0], weight.shape[1]
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dweight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for back, inside in _reached(tokens, taps, cu_seqlens):
        kept = torch.where(inside, grad[back:], 0.0)
        dx[: tokens - back] += kept * weight[:, taps - 1 - back]
        dweight[:, taps - 1 - back] = (kept * x[: tokens - back]).sum(0)
    return dx, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cu_seqlens = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, cu_seqlens)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx, dweight = torch.ops.hydragraph.causal_convolution_backward(grad, *ctx.saved_tensors)
    return dx, dweight, grad.sum(0) if ctx.biased else None, None


_forward.register_fake(lambda x, *_: contiguous_like(x)[0])
_backward.register_fake(lambda grad, x, weight, cu_seqlens: contiguous_like(x, weight))
_forward.register_autograd(_differentiate, setup_context=_save)

"""Attention with a window or capped scores on a CPU, one tile of queries at a time.

N sequences of L tokens, H heads of size D; tiles of R queries and the C keys to which they attend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hydragraph.kernels.attention_settings import AttentionSettings, visible
from hydragraph.kernels.new_tensors import wide_dtype

aten = torch.ops.aten

# Maximum queries per tile; larger tiles multiply a query with more keys outside its window.
_ROWS = 128
# Maximum scores per tile, 16 MB in fp32.
_SCORES = 1 << 22


def forward(q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> tuple[Tensor, Tensor]:
    """Return the output [N, H, L, D] and the log-sum-exp [N, H, L]."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))
    for rows, columns in _tiles(q, settings):
        tile = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        hidden = _hidden(rows, columns, settings)
        if settings.cap is None:
            out[:, :, rows], lse[:, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(
                *tile, 0.0, False, attn_mask=_mask(hidden, q), scale=settings.scale
            )
            continue
        queries, keys, values = (x.to(lse.dtype) for x in tile)
        scores, _ = _capped(queries, keys, hidden, settings.scale, settings.cap)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores.sub_(lse[:, :, rows, None]).exp_() @ values).to(q.dtype)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows, columns in _tiles(q, settings):
        tile = grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows]
        hidden = _hidden(rows, columns, settings)
        if settings.cap is None:
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tile, 0.0, False, attn_mask=_mask(hidden, q), scale=settings.scale
            )
        else:
            gradients = _capped_backward(*tile, hidden, settings.scale, settings.cap)
        dq[:, :, rows] = gradients[0]
        dk[:, :, columns] += gradients[1]
        dv[:, :, columns] += gradients[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _capped_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, hidden: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, q, k, v, out))
    scores, slope = _capped(q, k, hidden, scale, cap)
    p = scores.sub_(lse[..., None]).exp_()
    delta = (out * grad).sum(-1, keepdim=True)
    ds = (grad @ v.mT).sub_(delta).mul_(p).mul_(slope.mul_(scale))
    return ds @ k, ds.mT @ q, p.mT @ grad


def _capped(q: Tensor, k: Tensor, hidden: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """Return a tile's capped scores, -inf if masked, and the cap's derivative, both [N, H, R, C]."""
    bent = (q @ k.mT).mul_(scale / cap).tanh_()
    slope = 1 - bent.square()
    return bent.mul_(cap).masked_fill_(hidden, float("-inf")), slope


def _hidden(rows: slice, columns: slice, settings: AttentionSettings) -> Tensor:
    places = torch.arange(columns.stop)
    return ~visible(places[rows], places[columns], settings)


def _mask(hidden: Tensor, q: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))


def _tiles(q: Tensor, settings: AttentionSettings) -> Iterator[tuple[slice, slice]]:
    sequences, heads, length, _ = q.shape
    before, after = (length if distance is None else distance for distance in settings.sides())
    reach = min(length, _ROWS + before + after)
    # Fewer rows per tile keep all scores within memory limits.
    rows = max(1, min(_ROWS, _SCORES // (sequences * heads * reach)))
    for first in range(0, length, rows):
        last = min(length, first + rows)
        yield slice(first, last), slice(max(0, first - before), min(length, last + after))

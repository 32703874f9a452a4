"""Dropout whose masks do not depend on the strategy, because each element has its own random word.

A word is a function of (seed, step, call in the model, sequence in the mini-batch, position, feature), so ranks,
packings, recomputations and resumed runs draw the same mask (`kernels.philox`). Inputs have T tokens along one
dimension; other dimensions are features.
"""

# Triton compiles functions without annotations.
# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydragraph.kernels.new_tensors import contiguous_like
from hydragraph.kernels.philox import ROUNDS, call_word, threshold, words
from hydragraph.kernels.triton_jit import KernelVariant, kernel, require_one_device, use_kernel

if TYPE_CHECKING:
    import triton.language as tl

_ROWS, _COLUMNS = 4, 256
_TRITON = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Form:
    """Sizes of a call whose input has part [:, first : first + length] of the features [outer, whole, inner]."""

    tokens: int
    after: int
    outer: int
    length: int
    inner: int
    whole: int
    first: int

    @property
    def features(self) -> int:
        return self.outer * self.length * self.inner

    def indices(self, device: torch.device) -> Tensor:
        part = torch.arange(self.length * self.inner, device=device) + self.first * self.inner
        starts = torch.arange(self.outer, device=device) * (self.whole * self.inner)
        return (starts[:, None] + part).flatten()


def _form(x: Tensor, token_dim: int, first: Tensor | None, dim: int, whole: int, scale: int) -> _Form:
    sizes = list(x.shape)
    after = math.prod(sizes[token_dim + 1 :])
    if first is None:
        features = math.prod(sizes[:token_dim]) * after
        return _Form(sizes[token_dim], after, 1, features, 1, features, 0)
    outer = math.prod(n for d, n in enumerate(sizes[:dim]) if d != token_dim)
    inner = math.prod(n for d, n in enumerate(sizes) if d > dim and d != token_dim)
    return _Form(sizes[token_dim], after, outer, sizes[dim], inner, whole, int(first) // scale)


@kernel("tokens", "after", "part", "whole", "first", "features", "call")
def _drop(
    x, out, keys,
    tokens, after, part, whole, first, features, call, threshold, scale,
    ROUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    here = (row < tokens) & (column < features)
    # at: offset in x [features before, tokens, after]. feature: the column's number in the whole
    # value; this rank has `part` of every `whole` features.
    at = column // after * (tokens * after) + row * after + column % after
    feature = column // part * whole + first + column % part
    key = tl.load(keys + 2 * row, mask=row < tokens, other=0)
    place = tl.load(keys + 2 * row + 1, mask=row < tokens, other=0)
    zeros = tl.zeros((ROWS, COLUMNS), tl.uint32)
    counter = (zeros + (feature >> 2).to(tl.uint32), zeros + place.to(tl.uint32), zeros + (place >> 32).to(tl.uint32))
    c0, c1, c2, c3 = tl.philox(key, counter[0], counter[1], counter[2], zeros + call.to(tl.uint32), ROUNDS)
    # One evaluation yields the words of four consecutive features.
    which = feature & 3
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    value = tl.load(x + at, mask=here, other=0.0)
    kept = tl.where(word.to(tl.int64) >= threshold, value.to(tl.float32) * scale, 0.0)
    tl.store(out + at, tl.where(place < 0, value, kept.to(value.dtype)), mask=here)


def variants() -> Iterator[KernelVariant]:
    for name in ("bf16", "fp16", "fp32"):
        numbers = ("tokens", "after", "part", "whole", "first", "features", "call", "threshold")
        signature = {"x": f"*{name}", "out": f"*{name}", "keys": "*i64"}
        signature |= dict.fromkeys(numbers, "i64") | {"scale": "fp32"}
        constants = {"ROUNDS": ROUNDS, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
        yield KernelVariant(f"dropout {name}", _drop, signature, constants)


def _launch(x: Tensor, keys: Tensor, form: _Form, call: int, p: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    part, whole = form.length * form.inner, form.whole * form.inner
    grid = (-(-form.tokens // _ROWS), -(-form.features // _COLUMNS))
    sizes = (form.tokens, form.after, part, whole, form.first * form.inner, form.features)
    _drop[grid](x.contiguous(), out, keys.contiguous(), *sizes, call, threshold(p), _scale(p), ROUNDS, _ROWS, _COLUMNS)
    return out


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def reference(x: Tensor, keys: Tensor, form: _Form, call: int, p: float, token_dim: int) -> Tensor:
    drawn = words(keys[0], form.indices(x.device), call)
    sizes = [n for d, n in enumerate(x.shape) if d != token_dim]
    kept = (drawn >= threshold(p)).view(-1, *sizes).movedim(0, token_dim)
    off = (keys[0, :, 1] < 0).view(-1, *[1] * (x.dim() - 1 - token_dim))
    scaled = (x.to(torch.promote_types(x.dtype, torch.float32)) * _scale(p)).to(x.dtype)
    return torch.where(off, x, torch.where(kept, scaled, 0)).contiguous()


@torch.library.custom_op("hydragraph::dropout", mutates_args=())
def _dropout(
    x: Tensor, keys: Tensor | None, block: Tensor | None, first: Tensor | None,
    p: float, call: int, token_dim: int, dim: int, whole: int, scale: int,
) -> Tensor:  # fmt: skip
    """Drop elements of x with probability p, and divide others by 1 - p.

    Args:
        keys: dropout keys of the tokens, [1, T, 2] int64; None only while tracing.
        block: number of the model's block, 0-d int64 on the CPU.
        first: start of this rank's shard of dimension `dim`, times `scale`, 0-d int64 on the CPU; None: unsharded.
        whole: size of dimension `dim` on all ranks.
    """
    if keys is None or block is None:
        raise AssertionError("hydragraph::dropout needs dropout keys, except while tracing")
    require_one_device("dropout", {"x": x, "keys": keys})
    form = _form(x, token_dim, first, dim, whole, scale)
    word = call_word(int(block), call)
    if x.dtype in _TRITON and use_kernel(x.device, "dropout"):
        return _launch(x, keys, form, word, p)
    return reference(x, keys, form, word, p, token_dim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, keys, block, first, *ctx.options = inputs
    ctx.save_for_backward(keys, block, first)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.hydragraph.dropout(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 9


_dropout.register_fake(lambda x, *_, **__: contiguous_like(x)[0])
_dropout.register_autograd(_differentiate, setup_context=_save)

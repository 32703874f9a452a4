"""Deterministic attention over packed sequences in Triton, forward and backward; shapes are as in `varlen_attention`.

FlashAttention-2 (Dao, 2023): the forward updates the maximum m of a query row's scores s and the sum l of exp2(s - m),
and rescales its accumulator. The backward recomputes p = exp2(s - lse) and uses ds = p (dp - delta), delta = rowsum(out
* grad). A cap c turns scores into c t, with t = tanh(s / c), and multiplies ds by 1 - t^2. One kernel over query tiles
computes dq, and one over key tiles dk and dv, so no two programs write the same element.

The grid depends only on T and N, so no length is copied from the GPU. Slots (programs) for sequence n begin at
starts[n] // tile + n; unused slots exit.
"""

# Triton compiles functions without annotations.
# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, unbound-name]
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hydragraph.kernels.attention_settings import AttentionSettings
from hydragraph.kernels.attention_tilings import INTERPRETED, LARGEST, Tiling, Tilings, padded, tilings
from hydragraph.kernels.triton_jit import Inlined, Kernel, KernelVariant, kernel, why_not

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PREPARE_OPTIONS: dict[str, object] = {"num_warps": 4, "enable_fp_fusion": True}
_LOG2_E = math.log2(math.e)
# Maximum that keeps offsets in a tile below 2^31
_MAX_STRIDE = 2**23


@dataclass(frozen=True)
class _Options:
    window: bool
    cap: bool

    def __str__(self) -> str:
        return " window" * self.window + " cap" * self.cap


_OPTIONS = tuple(_Options(window, cap) for window in (False, True) for cap in (False, True))


def _options(settings: AttentionSettings) -> _Options:
    return _Options(settings.window is not None, settings.cap is not None)


@Inlined
def _locate(starts, sequences, slot, TILE: tl.constexpr):  # noqa: N803
    # Count sequences whose first slot (starts[n] // TILE + n) is at most `slot`.
    seen = 0
    for n in range(0, sequences, 128):
        index = n + tl.arange(0, 128)
        start = tl.load(starts + index, mask=index < sequences, other=0)
        seen += tl.sum(((index < sequences) & (start // TILE + index <= slot)).to(tl.int32))
    sequence = seen - 1
    return sequence, tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)


@Inlined
def _columns(row, length, causal, window, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr):  # noqa: N803
    """Return a tile's first key column, its first column that needs a mask, and the end."""
    until = tl.where(causal != 0, tl.minimum(length, row + ROWS), length)
    whole = tl.where(causal != 0, tl.minimum(length, row + 1), length) // COLUMNS * COLUMNS
    begin = 0
    # All tiles are masked: a third loop would need more registers
    if WINDOW:
        until = tl.minimum(until, row + ROWS + window - 1)
        begin = tl.maximum(0, row - window + 1) // COLUMNS * COLUMNS
        whole = begin
    return begin, whole, until


@Inlined
def _load(at, tokens, dims, EDGE: tl.constexpr, FULL: tl.constexpr):  # noqa: N803
    if EDGE:
        tile = tl.load(at, mask=tokens & dims, other=0.0)
    elif FULL:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=dims, other=0.0)
    return tile


@Inlined
def _seen(rows, columns, causal, window, WINDOW: tl.constexpr):  # noqa: N803
    seen = (columns <= rows) | (causal == 0)
    if WINDOW:
        seen = seen & (rows - columns < window) & (rows - columns > -window)
    return seen


@Inlined
def _bent(scores, cap_log2):
    """Return tanh(scores / cap), exact at both infinities."""
    return 1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap_log2)))


@kernel("sequences", "group", "causal", "window")
def _attend(
    q, k, v, out, lse, starts,
    sequences, group, causal, window, scale_log2, cap_log2,
    q_token, q_head, k_token, k_head, v_token, v_head,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # One program per slot and query head.
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence, first, end = _locate(starts, sequences, slot, ROWS)
    length = (end - first).to(tl.int32)
    # A causal sequence's most expensive rows start first.
    row = ((end // ROWS - slot + sequence) * ROWS).to(tl.int32)
    if row >= length:
        return
    rows = row + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    inner = tl.arange(0, COLUMNS)
    q_at = q + head * q_head
    k_at = k + head // group * k_head
    v_at = v + head // group * v_head
    in_q = (rows < length)[:, None] & (dims < SIZE)[None, :]
    queries = tl.load(q_at + (first + rows)[:, None] * q_token + dims[None, :], mask=in_q, other=0.0)
    k_tile = inner[None, :] * k_token + dims[:, None]
    v_tile = inner[:, None] * v_token + dims[None, :]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    begin, whole, until = _columns(row, length, causal, window, ROWS, COLUMNS, WINDOW)
    # edge 0: tiles that all rows see whole, unmasked. edge 1: the rest.
    for edge in tl.static_range(2):
        for n in tl.range(tl.where(edge == 1, whole, begin), tl.where(edge == 1, until, whole), COLUMNS):
            columns = n + inner
            k_from = k_at + (first + n) * k_token + k_tile
            v_from = v_at + (first + n) * v_token + v_tile
            keys = _load(k_from, (columns < length)[None, :], (dims < SIZE)[:, None], edge == 1, SIZE == PADDED)
            values = _load(v_from, (columns < length)[:, None], (dims < SIZE)[None, :], edge == 1, SIZE == PADDED)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale_log2
            if CAP:
                scores = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap_log2)))
            if edge == 1:
                counts = (columns < length)[None, :] & _seen(rows[:, None], columns[None, :], causal, window, WINDOW)
                scores = tl.where(counts, scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            if WINDOW:
                # For a row without columns, any finite shift makes p zero.
                shift = tl.where(larger == float("-inf"), 0.0, larger)
            else:
                # Every row sees column 0 in its first tile.
                shift = larger
            p = tl.exp2(scores - shift[:, None])
            shrink = tl.exp2(largest - shift)
            mass = mass * shrink + tl.sum(p, 1)
            total = tl.dot(p.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION)
            largest = larger
    heads = tl.num_programs(1)
    to = (first + rows) * heads + head
    tl.store(out + to[:, None] * SIZE + dims[None, :], (total / mass[:, None]).to(out.dtype.element_ty), mask=in_q)
    tl.store(lse + to, (largest + tl.log2(mass)) * 0.6931471805599453, mask=rows < length)  # ln 2


@kernel("tokens")
def _prepare(
    out, grad, lse, delta, lse_log2,
    tokens, grad_token, grad_head,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # delta and lse_log2 are [Hq, T], for contiguous reads.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED)
    inside = rows < tokens
    both = inside[:, None] & (dims < SIZE)[None, :]
    at = rows * tl.num_programs(1) + head
    one = tl.load(out + at[:, None] * SIZE + dims[None, :], mask=both, other=0.0).to(tl.float32)
    other = tl.load(grad + rows[:, None] * grad_token + head * grad_head + dims[None, :], mask=both, other=0.0)
    to = head * tokens + rows
    tl.store(delta + to, tl.sum(one * other.to(tl.float32), 1), mask=inside)
    tl.store(lse_log2 + to, tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634, mask=inside)  # log2(e)


@kernel("sequences", "tokens", "group", "causal", "window")
def _differentiate_queries(
    q, k, v, grad, delta, lse_log2, dq, starts,
    sequences, tokens, group, causal, window, scale, scale_log2, cap_log2,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    slot = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence, first, end = _locate(starts, sequences, slot, ROWS)
    length = (end - first).to(tl.int32)
    row = ((end // ROWS - slot + sequence) * ROWS).to(tl.int32)
    if row >= length:
        return
    rows = row + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    inner = tl.arange(0, COLUMNS)
    k_at = k + head // group * k_head
    v_at = v + head // group * v_head
    in_q = (rows < length)[:, None] & (dims < SIZE)[None, :]
    far = first + rows
    queries = tl.load(q + head * q_head + far[:, None] * q_token + dims[None, :], mask=in_q, other=0.0)
    grads = tl.load(grad + head * grad_head + far[:, None] * grad_token + dims[None, :], mask=in_q, other=0.0)
    shift = tl.load(delta + head * tokens + far, mask=rows < length, other=0.0)
    mass = tl.load(lse_log2 + head * tokens + far, mask=rows < length, other=float("inf"))
    k_tile = inner[None, :] * k_token + dims[:, None]
    v_tile = inner[None, :] * v_token + dims[:, None]
    total = tl.zeros([ROWS, PADDED], tl.float32)
    begin, whole, until = _columns(row, length, causal, window, ROWS, COLUMNS, WINDOW)
    for edge in tl.static_range(2):
        for n in tl.range(tl.where(edge == 1, whole, begin), tl.where(edge == 1, until, whole), COLUMNS):
            columns = n + inner
            inside = (columns < length)[None, :] & (dims < SIZE)[:, None]
            keys = tl.load(k_at + (first + n) * k_token + k_tile, mask=inside, other=0.0)
            values = tl.load(v_at + (first + n) * v_token + v_tile, mask=inside, other=0.0)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale_log2
            if CAP:
                bent = _bent(scores, cap_log2)
                scores = bent * cap_log2
            if edge == 1:
                counts = (columns < length)[None, :] & _seen(rows[:, None], columns[None, :], causal, window, WINDOW)
                scores = tl.where(counts, scores, float("-inf"))
            p = tl.exp2(scores - mass[:, None])
            ds = p * (tl.dot(grads, values, input_precision=PRECISION) - shift[:, None])
            if CAP:
                ds = ds * (1 - bent * bent)
            total = tl.dot(ds.to(keys.dtype), tl.trans(keys), total, input_precision=PRECISION)
    to = (far * tl.num_programs(1) + head)[:, None] * SIZE + dims[None, :]
    tl.store(dq + to, (total * scale).to(dq.dtype.element_ty), mask=in_q)


@kernel("sequences", "tokens", "group", "causal", "window")
def _differentiate_keys(
    q, k, v, grad, delta, lse_log2, dk, dv, starts,
    sequences, tokens, group, causal, window, scale, scale_log2, cap_log2,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # One program per slot of key columns and key/value head; scores are transposed: [COLUMNS, ROWS].
    slot = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, first, end = _locate(starts, sequences, slot, COLUMNS)
    length = (end - first).to(tl.int32)
    column = ((slot - sequence - first // COLUMNS) * COLUMNS).to(tl.int32)
    if column >= length:
        return
    columns = column + tl.arange(0, COLUMNS)
    dims = tl.arange(0, PADDED)
    inner = tl.arange(0, ROWS)
    in_k = (columns < length)[:, None] & (dims < SIZE)[None, :]
    far = first + columns
    keys = tl.load(k + kv_head * k_head + far[:, None] * k_token + dims[None, :], mask=in_k, other=0.0)
    values = tl.load(v + kv_head * v_head + far[:, None] * v_token + dims[None, :], mask=in_k, other=0.0)
    q_tile = inner[None, :] * q_token + dims[:, None]
    grad_tile = inner[:, None] * grad_token + dims[None, :]
    k_total = tl.zeros([COLUMNS, PADDED], tl.float32)
    v_total = tl.zeros([COLUMNS, PADDED], tl.float32)
    begin = tl.where(causal != 0, column // ROWS * ROWS, 0)
    until = length
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(0, column - window + 1) // ROWS * ROWS)
        until = tl.minimum(length, column + COLUMNS + window - 1)
    for member in range(group):
        head = kv_head * group + member
        q_at = q + head * q_head
        grad_at = grad + head * grad_head
        delta_at = delta + head * tokens + first
        mass_at = lse_log2 + head * tokens + first
        # A second loop, without masks, would need more registers.
        for m in tl.range(begin, until, ROWS):
            rows = m + inner
            in_q = (rows < length)[None, :] & (dims < SIZE)[:, None]
            in_grad = (rows < length)[:, None] & (dims < SIZE)[None, :]
            queries = tl.load(q_at + (first + m) * q_token + q_tile, mask=in_q, other=0.0)
            grads = tl.load(grad_at + (first + m) * grad_token + grad_tile, mask=in_grad, other=0.0)
            # An lse of inf makes p = exp2(-inf) = 0.
            mass = tl.load(mass_at + rows, mask=rows < length, other=float("inf"))
            shift = tl.load(delta_at + rows, mask=rows < length, other=0.0)
            scores = tl.dot(keys, queries, input_precision=PRECISION) * scale_log2
            if CAP:
                bent = _bent(scores, cap_log2)
                scores = bent * cap_log2
            counts = _seen(rows[None, :], columns[:, None], causal, window, WINDOW)
            p = tl.exp2(tl.where(counts, scores - mass[None, :], float("-inf")))
            v_total = tl.dot(p.to(grads.dtype), grads, v_total, input_precision=PRECISION)
            ds = p * (tl.dot(values, tl.trans(grads), input_precision=PRECISION) - shift[None, :])
            if CAP:
                ds = ds * (1 - bent * bent)
            k_total = tl.dot(ds.to(queries.dtype), tl.trans(queries), k_total, input_precision=PRECISION)
    to = (far * tl.num_programs(1) + kv_head)[:, None] * SIZE + dims[None, :]
    tl.store(dk + to, (k_total * scale).to(dk.dtype.element_ty), mask=in_k)
    tl.store(dv + to, v_total.to(dv.dtype.element_ty), mask=in_k)


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if reason := why_not(q.device):
        return reason
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"no kernel for {q.dtype}, {k.dtype}, {v.dtype}"
    if not 16 <= q.shape[2] <= LARGEST or not q.shape[2] == k.shape[2] == v.shape[2]:
        return f"no kernel for {q.dtype} heads of size {q.shape[2]}: the size must be 16 to {LARGEST}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, settings: AttentionSettings) -> tuple[Tensor, Tensor]:
    """Return the output [T, Hq, D] and the natural log-sum-exp [T, Hq] in fp32."""
    q, k, v = (_dense(x) for x in (q, k, v))
    tokens, heads, size = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens:
        tiling = _tilings(q, settings).forward
        _attend[_grid(starts, tokens, tiling.rows, heads)](
            *(q, k, v, out, lse, starts, len(starts) - 1, heads // k.shape[1], int(settings.causal)),
            *(settings.window or 0, settings.scale * _LOG2_E, (settings.cap or 0.0) * _LOG2_E),
            *_strides(q, k, v),
            **_constants(size, tiling, q.dtype, _options(settings)),
            **tiling.options(),
        )
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = (_dense(x) for x in (grad, q, k, v))
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    tokens, heads, size = q.shape
    if not tokens:
        return dq, dk, dv
    tiling = _tilings(q, settings)
    kv_heads = k.shape[1]
    delta, lse_log2 = lse.new_empty((2, heads, tokens))
    _prepare[(-(-tokens // 64), heads)](
        *(out.contiguous(), grad, lse.contiguous(), delta, lse_log2, tokens, *_strides(grad)),
        SIZE=size,
        PADDED=padded(size, q.dtype),
        ROWS=64,
        **_PREPARE_OPTIONS,
    )
    inputs = (q, k, v, grad, delta, lse_log2)
    numbers = (
        *(starts, len(starts) - 1, tokens, heads // kv_heads, int(settings.causal), settings.window or 0),
        *(settings.scale, settings.scale * _LOG2_E, (settings.cap or 0.0) * _LOG2_E),
    )
    options = _options(settings)
    strides = _strides(q, k, v, grad)
    _differentiate_keys[_grid(starts, tokens, tiling.keys.columns, kv_heads)](
        *(*inputs, dk, dv, *numbers, *strides),
        **_constants(size, tiling.keys, q.dtype, options),
        **tiling.keys.options(),
    )
    _differentiate_queries[_grid(starts, tokens, tiling.queries.rows, heads)](
        *(*inputs, dq, *numbers, *strides),
        **_constants(size, tiling.queries, q.dtype, options),
        **tiling.queries.options(),
    )
    return dq, dk, dv


def variants(capability: tuple[int, int]) -> Iterator[KernelVariant]:
    """Yield the kernels' variants for a compute capability, without fp16."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        yield _variant(_prepare, name, "", {"SIZE": 128, "PADDED": 128, "ROWS": 64}, _PREPARE_OPTIONS)
        for options in _OPTIONS:
            for size, tiling in tilings(dtype, capability, options == _OPTIONS[0]).items():
                parts = (tiling.forward, tiling.queries, tiling.keys)
                for function, part in zip((_attend, _differentiate_queries, _differentiate_keys), parts, strict=True):
                    constants = _constants(size, part, dtype, options)
                    yield _variant(function, name, f" D{size}{options}", constants, part.options())


def _variant(
    kernel: Kernel, dtype: str, form: str, constants: dict[str, object], options: dict[str, object]
) -> KernelVariant:
    kinds = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), f"*{dtype}")
    kinds |= dict.fromkeys(("lse", "delta", "lse_log2"), "*fp32") | {"starts": "*i32"}
    kinds |= dict.fromkeys(("scale", "scale_log2", "cap_log2"), "fp32")
    names = kernel.compiled.arg_names
    strides = tuple(name for name in names if name.endswith(("_token", "_head")))
    signature = {name: kinds.get(name, "i32") for name in names if name not in constants}
    label = f"attention {kernel.function.__name__} {dtype}{form}"
    return KernelVariant(label, kernel, signature, constants, options, strides)


def _tilings(q: Tensor, settings: AttentionSettings) -> Tilings:
    if q.device.type == "cpu":
        return INTERPRETED
    capability = torch.cuda.get_device_capability(q.device)
    return tilings(q.dtype, capability, settings.plain)[padded(q.shape[2], q.dtype)]


def _constants(size: int, tiling: Tiling, dtype: torch.dtype, options: _Options) -> dict[str, object]:
    precision = "tf32" if dtype != torch.float32 else "ieee" if tiling.exact else "tf32x3"
    tile = {"SIZE": size, "PADDED": padded(size, dtype), "ROWS": tiling.rows, "COLUMNS": tiling.columns}
    return {**tile, "PRECISION": precision, "WINDOW": options.window, "CAP": options.cap}


def _grid(starts: Tensor, tokens: int, tile: int, heads: int) -> tuple[int, int]:
    return tokens // tile + len(starts) - 1, heads


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and 0 <= x.stride(0) < _MAX_STRIDE else x.contiguous()

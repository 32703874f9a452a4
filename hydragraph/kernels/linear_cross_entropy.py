"""Logits of the output head and their loss, computed in chunks of tokens, without a [T, V] tensor.

A chunk's logits are reduced to a loss and overwritten by their gradient, from which the gradients of hidden states and
head are computed (Liger-Kernel, Hsu et al., 2024; Cut Cross-Entropy, Wijmans et al., 2024). If the vocabulary is
sharded, a rank has the rows [first, first + V) of the head, and `exchange` combines the ranks' statistics. For logits
z, with label smoothing s over N classes:

    loss = log(sum exp(z)) - (1 - s) z_label - s / N sum z      gradient = softmax(z) - (1 - s) one_hot - s / N

Shapes: T tokens, E the hidden size, V head rows on this rank, C tokens per chunk.
"""

# Triton compiles functions without annotations.
# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydragraph.kernels.new_tensors import wide_dtype
from hydragraph.kernels.triton_jit import KernelVariant, kernel, use_kernel

if TYPE_CHECKING:
    import triton.language as tl

Exchange = Callable[[Tensor], Tensor]
"""Function that combines this rank's statistics [3, C] with those of all ranks.

A token's statistics are the largest logit, the sum of exp(logit - largest), and the target-weighted mean logit.
"""

Target = tuple[float, float]
"""Weights of the label and of every class in a token's target distribution."""

ONE_HOT: Target = (1.0, 0.0)

_BLOCK = 4096
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@kernel("first")
def _reduce(
    logits, labels, statistics,
    first, size, row_stride, of_label, of_each,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # One program per token.
    token = tl.program_id(0).to(tl.int64)
    tokens = tl.num_programs(0)
    row = logits + token * row_stride
    inner = tl.arange(0, BLOCK)
    # Online softmax: mass[i] sums exp(value - largest) over columns n + i, and is rescaled
    # for each larger value.
    largest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), 0)
    mass = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(0, size, BLOCK):
        value = tl.load(row + n + inner, mask=n + inner < size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, 0))
        # exp(-inf - -inf) would be NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
        # 0 * -inf would be NaN.
        total += tl.where((n + inner < size) & (of_each > 0.0), value, 0.0)
    label = tl.load(labels + token) - first
    here = (label >= 0) & (label < size)
    tl.store(statistics + token, largest)
    tl.store(statistics + tokens + token, tl.sum(mass, 0))
    target = of_label * tl.load(row + label, mask=here, other=0.0).to(tl.float32) + of_each * tl.sum(total, 0)
    tl.store(statistics + 2 * tokens + token, target)


@kernel("first", "ignored")
def _differentiate(
    logits, labels, lse,
    first, size, ignored, row_stride, of_label, of_each,
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    row = logits + token * row_stride
    label = tl.load(labels + token)
    mass = tl.load(lse + token)
    scale = tl.where(label == ignored, 0.0, 1.0)
    for n in range(0, size, BLOCK):
        column = n + inner
        value = tl.load(row + column, mask=column < size, other=0.0).to(tl.float32)
        p = tl.exp(value - mass) - tl.where(column == label - first, of_label, 0.0) - of_each
        # An ignored token's logits may be infinite.
        tl.store(row + column, tl.where(scale > 0.0, p, 0.0).to(logits.dtype.element_ty), mask=column < size)


def target_of(smoothing: float, classes: int) -> Target:
    return (1.0 - smoothing, smoothing / classes) if smoothing else ONE_HOT


@torch.library.custom_op("hydragraph::head_loss", mutates_args=())
def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    rows = weight.shape[0]
    return loss_and_gradients(hidden, weight, labels, ignored, rows, target=target_of(smoothing, rows))


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignored: int,
    rows: int,
    first: int = 0,
    exchange: Exchange | None = None,
    target: Target = ONE_HOT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross-entropy of `hidden @ weight.T`, and the gradients of hidden and weight.

    The loss is in fp32 (fp64 for fp64 inputs). With a sharded vocabulary, the caller must sum the gradient of hidden
    over ranks.

    Args:
        hidden: [T, E].
        weight: [V, E], of the same dtype as hidden.
        labels: [T] int64 in the full vocabulary.
        ignored: label of tokens without a loss or gradient.
        rows: approximate number of head rows per rank, which determines the chunks; must be equal on all ranks.
        first: this rank's first row of the head.
        exchange: None if this rank has the full vocabulary.
        target: weights of the label and of every class, (1 - s, s / N).
    """
    wide = wide_dtype(hidden.dtype)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    size = chunk_tokens(hidden.shape[0], hidden.shape[1], rows)
    for a in range(0, hidden.shape[0], size):
        part = hidden[a : a + size]
        label = labels[a : a + size].contiguous()
        logits = part @ weight.T
        losses, lse = token_losses(logits, label, ignored, first, exchange, target)
        loss += losses.sum()
        # From here on, `logits` contains their gradient.
        to_gradient(logits, label, lse, first, ignored, target)
        torch.mm(logits, weight, out=d_hidden[a : a + size])
        add_product(d_weight, logits, part)
    return loss, d_hidden, d_weight.to(weight.dtype)


def token_losses(
    logits: Tensor, labels: Tensor, ignored: int, first: int, exchange: Exchange | None, target: Target = ONE_HOT
) -> tuple[Tensor, Tensor]:
    statistics = statistics_of(logits, labels, first, target)
    if exchange is not None:
        statistics = exchange(statistics)
    lse = statistics[0] + statistics[1].log()
    return torch.where(labels == ignored, 0.0, lse - statistics[2]), lse


def like_gradients(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=wide_dtype(hidden.dtype))
    return loss, torch.empty_like(hidden, memory_format=torch.contiguous_format), weight.new_empty(weight.shape)


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def scale_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return (*(_scaled(own, grad) for own in ctx.saved_tensors), *(None for _ in ctx.needs_input_grad[2:]))


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if gradient.dtype == factor.dtype:
        return gradient * factor
    scaled: Tensor = torch.ops.hydragraph.scaled(gradient, factor)
    return scaled


@torch.library.custom_op("hydragraph::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Scale a gradient without an fp32 copy."""
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient))


scaled.register_fake(lambda gradient, factor: torch.empty_like(gradient))
head_loss.register_fake(lambda hidden, weight, labels, ignored, smoothing=0.0: like_gradients(hidden, weight))
head_loss.register_autograd(scale_gradients, setup_context=keep_gradients)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int = -100, smoothing: float = 0.0) -> Tensor:
    logits = (hidden @ weight.T).to(wide_dtype(hidden.dtype))
    return torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
    )


def combine(statistics: Tensor) -> Tensor:
    """Combine R ranks' statistics [R, 3, C], in order."""
    largest = statistics[:, 0].amax(0)
    # Each rank's mass refers to its largest logit.
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    mass = (statistics[:, 1] * (statistics[:, 0] - shift).exp()).sum(0)
    return torch.stack([largest, mass, statistics[:, 2].sum(0)])


def working_bytes(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the bytes of temporary tensors: a chunk's logits and the head's fp32 gradient."""
    chunk = min(tokens, chunk_tokens(tokens, hidden, vocabulary)) * vocabulary
    widened = 0 if dtype == wide_dtype(dtype) else vocabulary * hidden
    return chunk * dtype.itemsize + (chunk + widened) * wide_dtype(dtype).itemsize


def chunk_tokens(tokens: int, hidden: int, vocabulary: int) -> int:
    """Return the tokens per chunk, a multiple of 128; its logits are about as large as all hidden states."""
    return max(128, min(tokens, -(-tokens * hidden // vocabulary)) // 128 * 128)


def statistics_of(logits: Tensor, labels: Tensor, first: int, target: Target = ONE_HOT) -> Tensor:
    """Return the statistics [3, C] of logits [C, V]."""
    if not use_kernel(logits.device, "linear_cross_entropy") or logits.dtype == torch.float64:
        return reference_statistics(logits, labels, first, target)
    statistics = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    sizes = (first, logits.shape[1], logits.stride(0))
    _reduce[(len(logits),)](logits, labels, statistics, *sizes, *target, BLOCK=_BLOCK, **_OPTIONS)
    return statistics


def reference_statistics(logits: Tensor, labels: Tensor, first: int, target: Target = ONE_HOT) -> Tensor:
    wide = logits.to(wide_dtype(logits.dtype))
    largest = wide.amax(1)
    mass = (wide - torch.where(largest == float("-inf"), 0.0, largest)[:, None]).exp_().sum(1)
    here, local = _local(labels, first, logits.shape[1])
    of_label, of_each = target
    mean = torch.where(here, of_label * wide.gather(1, local[:, None])[:, 0], 0.0)
    return torch.stack([largest, mass, mean + of_each * wide.sum(1) if of_each else mean])


def _local(labels: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    local = labels - first
    here = (local >= 0) & (local < rows)
    return here, torch.where(here, local, 0)


def to_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignored: int, target: Target = ONE_HOT
) -> None:
    """Turn logits into softmax(logits) - target in place, 0 for ignored tokens."""
    if not use_kernel(logits.device, "linear_cross_entropy") or logits.dtype == torch.float64:
        logits.copy_(reference_gradient(logits, labels, lse, first, ignored, target))
        return
    sizes = (first, logits.shape[1], ignored, logits.stride(0))
    _differentiate[(len(logits),)](logits, labels, lse, *sizes, *target, BLOCK=_BLOCK, **_OPTIONS)


def reference_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignored: int, target: Target = ONE_HOT
) -> Tensor:
    of_label, of_each = target
    p = (logits.to(lse.dtype) - lse[:, None]).exp_()
    here, local = _local(labels, first, logits.shape[1])
    p.scatter_add_(1, local[:, None], -of_label * here.to(p.dtype)[:, None])
    if of_each:
        p -= of_each
    return p.masked_fill_(labels[:, None] == ignored, 0.0)


def add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Add logits.T @ hidden to the head's fp32 (fp64) gradient; 16-bit sums would lose later chunks' products."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.T, hidden)
    elif logits.device.type == "cuda":
        torch.addmm(total, logits.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += logits.T @ hidden


def variants() -> Iterator[KernelVariant]:
    """Yield the kernels' variants, without fp16."""
    for dtype in ("bf16", "fp32"):
        common = {"logits": f"*{dtype}", "labels": "*i64", "first": "i32", "size": "i32", "row_stride": "i32"}
        common |= {"of_label": "fp32", "of_each": "fp32"}
        block = {"BLOCK": _BLOCK}
        reduce = common | {"statistics": "*fp32"}
        yield KernelVariant(
            f"linear_cross_entropy _reduce {dtype}", _reduce, reduce, block, _OPTIONS, ("size", "row_stride")
        )
        gradient = common | {"lse": "*fp32", "ignored": "i32"}
        name = f"linear_cross_entropy _differentiate {dtype}"
        yield KernelVariant(name, _differentiate, gradient, block, _OPTIONS, ("size", "row_stride"))

"""Fused product and loss of the head, by chunks of tokens: the [T, V] logits are never materialised.

One chunk at a time, logits are computed, reduced to a loss, turned into their own gradient in place, and multiplied
into the gradients of the hidden states and of the head: three matrix products, as many as the unfused computation has,
with one chunk of logits in memory. The idea is that of Liger-Kernel (Hsu et al., 2024) and of Cut Cross-Entropy
(Wijmans et al., 2024). The gradients are those of a sum over tokens: backward only scales them.

If the vocabulary is sharded over tensor-parallel ranks, each rank has the rows [first, first + V) of the head. Per
token it computes the largest logit, the sum of exp(logit - largest), and the label's logit if the rank has it;
`exchange` combines those of all ranks (see `combine`), chunk by chunk in the same order on all ranks.

Label smoothing s over N classes, as in `torch.nn.functional.cross_entropy`, replaces the label's logit by the mean
logit of the smoothed target: (1 - s) times the label's logit plus s / N times the sum of all logits. This is a sum over
the vocabulary too, so ranks exchange no more than without it:

    loss = log(sum exp(z)) - (1 - s) z_label - s / N sum z      gradient = softmax(z) - (1 - s) one_hot - s / N

Shapes: T tokens, E the hidden size, V rows of the head on this rank, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.triton_jit import KernelVariant, kernel, require_one_device, use_kernel

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

Exchange = Callable[[Tensor], Tensor]
"""[3, C] of this rank -> [3, C] of all: largest logit, sum of exp(logit - largest), mean logit of the target."""

Target = tuple[float, float]
"""Weights of a token's label, and of every class in addition."""

ONE_HOT: Target = (1.0, 0.0)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BLOCK = 4096
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@kernel("first")
def _reduce(  # type: ignore[no-untyped-def]
    logits,
    labels,
    statistics,
    first,
    size,
    row_stride,
    of_label,
    of_each,
    BLOCK: tl.constexpr,  # noqa: N803
):
    # One program per token: largest, sum of exp(logit - largest), weighted logit of the label or 0 and of each class.
    token = tl.program_id(0).to(tl.int64)
    tokens = tl.num_programs(0)
    row = logits + token * row_stride
    inner = tl.arange(0, BLOCK)
    largest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), 0)
    mass = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(0, size, BLOCK):
        value = tl.load(row + n + inner, mask=n + inner < size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, 0))
        # If all values so far are -inf, exp(-inf - -inf) would be NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
        # Without smoothing logits are not added: 0 * -inf would be NaN.
        total += tl.where((n + inner < size) & (of_each > 0.0), value, 0.0)
    label = tl.load(labels + token) - first
    here = (label >= 0) & (label < size)
    tl.store(statistics + token, largest)
    tl.store(statistics + tokens + token, tl.sum(mass, 0))
    target = of_label * tl.load(row + label, mask=here, other=0.0).to(tl.float32) + of_each * tl.sum(total, 0)
    tl.store(statistics + 2 * tokens + token, target)


@kernel("first", "ignored")
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    labels,
    lse,
    first,
    size,
    ignored,
    row_stride,
    of_label,
    of_each,
    BLOCK: tl.constexpr,  # noqa: N803
):
    # In place: softmax(logits) - target, or 0 for an ignored token. One program per token.
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
        # Not p * scale: an ignored token's logits may be infinite.
        tl.store(row + column, tl.where(scale > 0.0, p, 0.0).to(logits.dtype.element_ty), mask=column < size)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignored: int = -100,
    first: int = 0,
    exchange: Exchange | None = None,
    chunk: int | None = None,
    smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` against labels, a scalar in fp32 (fp64 for fp64).

    Differentiable once, in hidden and weight. If the vocabulary is sharded, the gradient of hidden is this rank's part:
    the sum over ranks is the gradient.

    Args:
        hidden: [T, E]. weight: [V, E], of the same dtype: bf16, fp16, fp32 or fp64.
        labels: [T] int64 over the whole vocabulary.
        ignored: tokens with this label contribute neither to the loss nor to gradients.
        first: index of this rank's first row of the head.
        exchange: combines the statistics of all ranks; None if this rank has the whole vocabulary.
        chunk: C; by default the number of tokens whose logits are about as large as the hidden states. Required with
            `exchange`, and equal on all ranks: their numbers of rows may differ, but not their chunks.
        smoothing: label smoothing, from 0 to 1.
        classes: size of the whole vocabulary; None: V. Required with `smoothing` and `exchange`.

    Raises:
        Unsupported: other shapes, dtypes, devices or smoothing, an exchange without a chunk, or one with smoothing but
            without the number of classes.
    """
    if exchange is not None and chunk is None:
        raise Unsupported(
            "an exchange without a chunk size",
            where="linear_cross_entropy",
            remedy="pass the same `chunk` on all ranks, such as chunk_tokens(tokens, hidden, rows of the largest part)",
        )
    if exchange is not None and smoothing and classes is None:
        raise Unsupported(
            "an exchange with label smoothing but without the number of classes",
            where="linear_cross_entropy",
            remedy="pass `classes`, the size of the whole vocabulary",
        )
    _check(hidden, weight, labels, chunk, smoothing)
    size = chunk or chunk_tokens(hidden.shape[0], hidden.shape[1], weight.shape[0])
    needs = (hidden.requires_grad and torch.is_grad_enabled(), weight.requires_grad and torch.is_grad_enabled())
    target = target_of(smoothing, classes or weight.shape[0])
    settings = (ignored, first, size, needs, target)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, settings, exchange)
    return loss


def target_of(smoothing: float, classes: int) -> Target:
    """Return the weights of a smoothed target."""
    return (1.0 - smoothing, smoothing / classes) if smoothing else ONE_HOT


@torch.library.custom_op("hydragraph::head_loss", mutates_args=())
def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int, smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients of hidden and weight: an operator for ranks with the whole vocabulary.

    All three come from one pass over the logits, which are never materialised; differentiating the loss only scales
    these gradients.
    """
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
    """Return the summed loss and its gradients of hidden and weight; arguments as for `linear_cross_entropy`.

    Args:
        rows: approximate number of the head's rows per rank, equal on all ranks: they must exchange the same chunks,
            even if the vocabulary is sharded unevenly.
        target: see `target_of`, with the number of classes on all ranks.
    """
    size = chunk_tokens(hidden.shape[0], hidden.shape[1], rows)
    loss, d_hidden, d_weight = _forward(hidden, weight, labels, ignored, first, size, (True, True), exchange, target)
    assert d_hidden is not None
    assert d_weight is not None
    return loss, d_hidden, d_weight


def like_gradients(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes of a loss and its gradients."""
    loss = hidden.new_empty((), dtype=_wide(hidden.dtype))
    return loss, torch.empty_like(hidden, memory_format=torch.contiguous_format), weight.new_empty(weight.shape)


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the gradients that were computed with the loss for backward."""
    ctx.save_for_backward(*output[1:])


def scale_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return the precomputed gradients times the loss's own, for an operator of hidden, weight and further inputs."""
    d_hidden, d_weight = ctx.saved_tensors
    # In the gradients' own dtype: an fp32 scale would make them fp32 as well.
    scaled = d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype)
    return (*scaled, *(None for _ in ctx.needs_input_grad[2:]))


head_loss.register_fake(lambda hidden, weight, labels, ignored, smoothing=0.0: like_gradients(hidden, weight))
head_loss.register_autograd(scale_gradients, setup_context=keep_gradients)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int = -100, smoothing: float = 0.0) -> Tensor:
    """Reference in plain PyTorch, for a rank with the whole vocabulary."""
    logits = (hidden @ weight.T).to(_wide(hidden.dtype))
    return torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
    )


def combine(statistics: Tensor) -> Tensor:
    """Combine the statistics [R, 3, C] of R ranks, in their order, into the [3, C] that `exchange` returns."""
    largest = statistics[:, 0].amax(0)
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    mass = (statistics[:, 1] * (statistics[:, 0] - shift).exp()).sum(0)
    return torch.stack([largest, mass, statistics[:, 2].sum(0)])


def working_bytes(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the bytes taken in addition to the results: those of a chunk, and of the head's fp32 gradient."""
    chunk = min(tokens, chunk_tokens(tokens, hidden, vocabulary)) * vocabulary
    widened = 0 if dtype == _wide(dtype) else vocabulary * hidden
    return chunk * dtype.itemsize + (chunk + widened) * _wide(dtype).itemsize


def chunk_tokens(tokens: int, hidden: int, vocabulary: int) -> int:
    """Return the number of tokens in a chunk: logits of about the size of the hidden states, in a multiple of 128.

    Smaller chunks would make matrix products too small to be fast, and need more passes over the gradient of the head.
    """
    return max(128, min(tokens, -(-tokens * hidden // vocabulary)) // 128 * 128)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        settings: tuple[int, int, int, tuple[bool, bool], Target],
        exchange: Exchange | None,
    ) -> Tensor:
        ignored, first, chunk, needs, target = settings
        loss, d_hidden, d_weight = _forward(hidden, weight, labels, ignored, first, chunk, needs, exchange, target)
        ctx.save_for_backward(*(x for x in (d_hidden, d_weight) if x is not None))
        ctx.needs = needs  # type: ignore[attr-defined]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)  # type: ignore[attr-defined]
        return (*(next(saved) * grad if needed else None for needed in ctx.needs), None, None, None)  # type: ignore[attr-defined]


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignored: int,
    first: int,
    chunk: int,
    needs: tuple[bool, bool],
    exchange: Exchange | None,
    target: Target,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss, and those of its gradients that are needed."""
    wide = _wide(hidden.dtype)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
    d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
    for a in range(0, hidden.shape[0], chunk):
        part = hidden[a : a + chunk]
        label = labels[a : a + chunk].contiguous()
        logits = part @ weight.T
        statistics = statistics_of(logits, label, first, target)
        if exchange is not None:
            statistics = exchange(statistics)
        lse = statistics[0] + statistics[1].log()
        loss += torch.where(label == ignored, 0.0, lse - statistics[2]).sum()
        if not any(needs):
            continue
        to_gradient(logits, label, lse, first, ignored, target)
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[a : a + chunk])
        if d_weight is not None:
            add_product(d_weight, logits, part)
    return loss, d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def statistics_of(logits: Tensor, labels: Tensor, first: int, target: Target = ONE_HOT) -> Tensor:
    """Return a rank's statistics of one chunk: [3, C] as for `Exchange`, from logits [C, V]."""
    if not use_kernel(logits.device, "linear_cross_entropy") or logits.dtype == torch.float64:
        return reference_statistics(logits, labels, first, target)
    statistics = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    sizes = (first, logits.shape[1], logits.stride(0))
    _reduce[(len(logits),)](logits, labels, statistics, *sizes, *target, BLOCK=_BLOCK, **_OPTIONS)
    return statistics


def reference_statistics(logits: Tensor, labels: Tensor, first: int, target: Target = ONE_HOT) -> Tensor:
    """Return a rank's statistics of one chunk in plain PyTorch: [3, C] as for `Exchange`, from logits [C, V]."""
    wide = logits.to(_wide(logits.dtype))
    largest = wide.amax(1)
    mass = (wide - torch.where(largest == float("-inf"), 0.0, largest)[:, None]).exp_().sum(1)
    here, local = _local(labels, first, logits.shape[1])
    of_label, of_each = target
    mean = torch.where(here, of_label * wide.gather(1, local[:, None])[:, 0], 0.0)
    return torch.stack([largest, mass, mean + of_each * wide.sum(1) if of_each else mean])


def _local(labels: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return which labels are among this rank's rows, and their local rows; 0 for the others."""
    local = labels - first
    here = (local >= 0) & (local < rows)
    return here, torch.where(here, local, 0)


def to_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignored: int, target: Target = ONE_HOT
) -> None:
    """Turn the logits of one chunk into softmax(logits) - target in place, 0 for ignored tokens."""
    if not use_kernel(logits.device, "linear_cross_entropy") or logits.dtype == torch.float64:
        logits.copy_(reference_gradient(logits, labels, lse, first, ignored, target))
        return
    sizes = (first, logits.shape[1], ignored, logits.stride(0))
    _differentiate[(len(logits),)](logits, labels, lse, *sizes, *target, BLOCK=_BLOCK, **_OPTIONS)


def reference_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignored: int, target: Target = ONE_HOT
) -> Tensor:
    """Return softmax(logits) - target of one chunk in plain PyTorch, 0 for ignored tokens, in fp32 or fp64."""
    of_label, of_each = target
    p = (logits.to(lse.dtype) - lse[:, None]).exp_()
    here, local = _local(labels, first, logits.shape[1])
    p.scatter_add_(1, local[:, None], -of_label * here.to(p.dtype)[:, None])
    if of_each:
        p -= of_each
    return p.masked_fill_(labels[:, None] == ignored, 0.0)


def add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Add logits.T @ hidden to the head's gradient, which is fp32 (fp64): 16-bit sums would lose later chunks."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.T, hidden)
    elif logits.device.type == "cuda":
        torch.addmm(total, logits.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += logits.T @ hidden


def variants() -> Iterator[KernelVariant]:
    """Yield the variants launched in training; fp16 is like bf16."""
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, smoothing: float) -> None:
    where = "linear_cross_entropy"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise Unsupported(
            f"hidden of shape {list(hidden.shape)} and weight of shape {list(weight.shape)}",
            where=where,
            remedy="pass [T, E] and [V, E]",
        )
    if hidden.dtype not in DTYPES or hidden.dtype != weight.dtype:
        raise Unsupported(
            f"hidden in {hidden.dtype} and weight in {weight.dtype}",
            where=where,
            remedy="cast both to one of bf16, fp16, fp32, fp64",
        )
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise Unsupported(
            f"labels of shape {list(labels.shape)} and {labels.dtype} for {hidden.shape[0]} tokens",
            where=where,
            remedy="pass one int64 label per token",
        )
    if not 0 <= smoothing <= 1:
        raise Unsupported(f"label smoothing of {smoothing}", where=where, remedy="pass a number from 0 to 1")
    if chunk is not None and chunk < 1:
        raise Unsupported(f"chunks of {chunk} tokens", where=where, remedy="pass 1 or more, or None")
    require_one_device(where, {"hidden": hidden, "weight": weight, "labels": labels})

"""Logits of the output head in chunks of tokens, and one cross-entropy per token.

Each loss's gradient (`factor`) is known only in the backward, which computes the logits again. Shapes and arguments are
as in `loss_and_gradients`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hydragraph.kernels import linear_cross_entropy as head
from hydragraph.kernels.linear_cross_entropy import Exchange
from hydragraph.kernels.new_tensors import wide_dtype


@torch.library.custom_op("hydragraph::head_token_losses", mutates_args=())
def head_token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return losses_of(hidden, weight, labels, ignored, weight.shape[0])


def losses_of(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignored: int,
    rows: int,
    first: int = 0,
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Return losses (0 for ignored tokens) and log-sum-exp, both [T]."""
    size = head.chunk_tokens(hidden.shape[0], hidden.shape[1], rows)
    losses, lses = like_losses(hidden)
    for a in range(0, hidden.shape[0], size):
        at = slice(a, a + size)
        label = labels[at].contiguous()
        losses[at], lses[at] = head.token_losses(hidden[at] @ weight.T, label, ignored, first, exchange)
    return losses, lses


@torch.library.custom_op("hydragraph::head_token_gradients", mutates_args=())
def head_token_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, factors: Tensor, start: Tensor | None,
    ignored: int, of_hidden: bool, of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return sum(losses * factors)'s gradients of hidden (this rank's summand) and weight (this rank's rows).

    Args:
        lse: log-sum-exp over the full vocabulary.
        start: this rank's first head row, 0-d; None: 0.
        of_hidden, of_weight: whether to compute the gradient; otherwise, it is empty.
    """
    size = head.chunk_tokens(hidden.shape[0], hidden.shape[1], weight.shape[0])
    first = 0 if start is None else int(start)
    d_hidden, _ = _like_gradients(hidden, weight, of_hidden, of_weight)
    d_weight = weight.new_zeros(weight.shape if of_weight else 0, dtype=lse.dtype)
    for a in range(0, hidden.shape[0], size):
        part = hidden[a : a + size]
        label = labels[a : a + size].contiguous()
        logits = part @ weight.T
        head.to_gradient(logits, label, lse[a : a + size], first, ignored)
        factor = torch.where(label == ignored, 0.0, factors[a : a + size])[:, None]
        if of_hidden:
            torch.mm(logits, weight, out=d_hidden[a : a + size]).mul_(factor)
        if of_weight:
            head.add_product(d_weight, logits, (part * factor).to(part.dtype))
    return d_hidden, d_weight.to(weight.dtype)


def like_losses(hidden: Tensor) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden.dtype))
    return losses, torch.empty_like(losses)


def _like_gradients(hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape if of_hidden else 0), weight.new_empty(weight.shape if of_weight else 0)


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *rest = inputs
    start = rest[0] if isinstance(rest[0], Tensor) else None
    ctx.ignored = rest[start is not None]
    ctx.save_for_backward(hidden, weight, labels, output[1], *([] if start is None else [start]))


def token_gradients(ctx: Any, factors: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, labels, lse, *start = ctx.saved_tensors
    needed = ctx.needs_input_grad[:2]
    # The gradient of a slice may have any strides.
    gradients = torch.ops.hydragraph.head_token_gradients(
        hidden, weight, labels, lse, factors.contiguous(), start[0] if start else None, ctx.ignored, *needed
    )
    own = [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]
    return (*own, *(None for _ in ctx.needs_input_grad[2:]))


head_token_losses.register_fake(lambda hidden, weight, labels, ignored: like_losses(hidden))
head_token_losses.register_autograd(token_gradients, setup_context=keep_operands)
head_token_gradients.register_fake(
    lambda hidden, weight, labels, lse, factors, start, ignored, of_hidden, of_weight: _like_gradients(
        hidden, weight, of_hidden, of_weight
    )
)

"""Tensor-parallel collectives as operators of the forward graph; each has its own backward.

They have no implementation: after differentiation they become calls on the `collectives` object that the runtime passes
to the graph, so one graph serves any group of ranks.

    R    the same value on every rank of the stage
    P    parts of a sum over ranks
    S    each rank has its own tokens

               forward             backward                      where
    tp_enter   R -> R  no-op       P -> R  all_reduce            before sharded products
    tp_sum     P -> R  all_reduce  R -> R  no-op                 after row-parallel products
    tp_gather  S -> R  all_gather  P -> S  reduce_scatter        before sharded products, with sequence parallelism
    tp_scatter P -> S  reduce_sc.  S -> R  all_gather            after row-parallel products, with sequence parallelism
    tp_split   R -> S  split       S -> R  all_gather            from replicated values to tokenwise operators
    tp_join    S -> R  all_gather  R -> S  split                 to operators that every rank repeats for all tokens

They form pairs of mutual backwards, as the adjoint of a sum over ranks is a copy to all of them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hydragraph.kernels.linear_cross_entropy import keep_gradients, like_gradients, scale_gradients
from hydragraph.kernels.linear_token_losses import keep_operands, like_losses, token_gradients


def _never(name: str) -> NoReturn:
    raise AssertionError(f"{name} runs only as a call on the runtime's collectives")


@torch.library.custom_op("hydragraph::tp_enter", mutates_args=())
def enter(x: Tensor) -> Tensor:
    """R -> R, before sharded operators; its gradient is summed over ranks."""
    _never("tp_enter")


@torch.library.custom_op("hydragraph::tp_sum", mutates_args=())
def sum_parts(x: Tensor) -> Tensor:
    """P -> R; its gradient is the same on every rank."""
    _never("tp_sum")


@torch.library.custom_op("hydragraph::tp_max", mutates_args=())
def maximum(x: Tensor) -> Tensor:
    """Elementwise maximum over ranks; has no gradient."""
    _never("tp_max")


@torch.library.custom_op("hydragraph::tp_gather", mutates_args=())
def gather(x: Tensor, dim: int, ranks: int) -> Tensor:
    """S -> R along the token dimension, before sharded operators; its gradient is summed and scattered."""
    _never("tp_gather")


@torch.library.custom_op("hydragraph::tp_scatter", mutates_args=())
def scatter(x: Tensor, dim: int, ranks: int) -> Tensor:
    """P -> S along the token dimension; its gradient is gathered."""
    _never("tp_scatter")


@torch.library.custom_op("hydragraph::tp_split", mutates_args=())
def split(x: Tensor, dim: int, ranks: int) -> Tensor:
    """R -> S: keep this rank's tokens; its gradient is gathered, so that the source of x gets all of it."""
    _never("tp_split")


@torch.library.custom_op("hydragraph::tp_join", mutates_args=())
def join(x: Tensor, dim: int, ranks: int) -> Tensor:
    """S -> R for operators that every rank repeats; the gradient keeps this rank's tokens."""
    _never("tp_join")


@torch.library.custom_op("hydragraph::tp_head_loss", mutates_args=())
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    start: Tensor,
    ignored: int,
    rows: int,
    smoothing: float,
    classes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """R, rows of the head from `start` -> the loss (R), and the gradients of hidden (P) and of these rows.

    `rows`: approximate rows per rank, equal on all ranks; `classes`: rows of all ranks; `smoothing`: of the labels.
    """
    _never("tp_head_loss")


@torch.library.custom_op("hydragraph::tp_head_token_losses", mutates_args=())
def head_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, ignored: int, rows: int
) -> tuple[Tensor, Tensor]:
    """R, rows of the head from `start` -> each token's loss and lse (R); arguments as for `tp_head_loss`."""
    _never("tp_head_token_losses")


# Received values are contiguous, regardless of the strides sent.
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _longer(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s * ranks if d == dim else s for d, s in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s // ranks if d == dim else s for d, s in enumerate(x.shape)])


# Shapes for the trace: no data is moved.
for _op in (enter, sum_parts, maximum):
    _op.register_fake(_like)
for _op in (gather, join):
    _op.register_fake(_longer)
for _op in (scatter, split):
    _op.register_fake(_shorter)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.geometry = inputs[1:]


def _backward(name: str) -> Any:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op = getattr(torch.ops.hydragraph, name)
        return (op(gradient, *ctx.geometry), *(None for _ in ctx.geometry))

    return backward


# tp_max has no backward: its only use, the maximum of logits, cancels in the loss.
enter.register_autograd(_backward("tp_sum"), setup_context=_keep)
sum_parts.register_autograd(lambda ctx, gradient: gradient, setup_context=_keep)
gather.register_autograd(_backward("tp_scatter"), setup_context=_keep)
scatter.register_autograd(_backward("tp_gather"), setup_context=_keep)
split.register_autograd(_backward("tp_join"), setup_context=_keep)
join.register_autograd(_backward("tp_split"), setup_context=_keep)

head_loss.register_fake(lambda hidden, weight, *_: like_gradients(hidden, weight))
head_loss.register_autograd(scale_gradients, setup_context=keep_gradients)

head_token_losses.register_fake(lambda hidden, weight, labels, start, ignored, rows: like_losses(hidden))
# Its backward exchanges nothing, and the gradient of hidden is this rank's part (P).
head_token_losses.register_autograd(token_gradients, setup_context=keep_operands)

# Method of the runtime's object that each operator becomes once both directions are traced.
METHODS = {
    torch.ops.hydragraph.tp_sum.default: "all_reduce",
    torch.ops.hydragraph.tp_max.default: "all_reduce_max",
    torch.ops.hydragraph.tp_gather.default: "all_gather",
    torch.ops.hydragraph.tp_join.default: "all_gather",
    torch.ops.hydragraph.tp_scatter.default: "reduce_scatter",
    torch.ops.hydragraph.tp_split.default: "split",
    torch.ops.hydragraph.tp_head_loss.default: "head_loss",
    torch.ops.hydragraph.tp_head_token_losses.default: "head_token_losses",
}
IDENTITY = torch.ops.hydragraph.tp_enter.default

"""Tensor-parallel collectives as operators of the forward graph; each knows its own backward.

They have no implementation: after differentiation they become calls on the `collectives` object that the runtime
passes to the graph, so one graph serves any group of ranks.

    R    the same value on every rank of the stage
    P    parts, whose sum over ranks is meant
    S    each rank has its own tokens

               forward             backward                      where
    tp_enter   R -> R  nothing     P -> R  all_reduce            before cut products
    tp_sum     P -> R  all_reduce  R -> R  nothing               behind row-parallel products
    tp_gather  S -> R  all_gather  P -> S  reduce_scatter        before cut products, under sequence parallelism
    tp_scatter P -> S  reduce_sc.  S -> R  all_gather            behind row-parallel products, likewise
    tp_split   R -> S  split       S -> R  all_gather            from what all ranks have to what works by tokens
    tp_join    S -> R  all_gather  R -> S  split                 to what every rank repeats for all tokens

Each is the other's backward in pairs, as the adjoint of a sum over ranks is a copy to all of them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hydragraph.kernels.linear_cross_entropy import keep_gradients, like_gradients, scale_gradients


def _never(name: str) -> NoReturn:
    raise AssertionError(f"{name} runs only as a call on the runtime's collectives")


@torch.library.custom_op("hydragraph::tp_enter", mutates_args=())
def enter(x: Tensor) -> Tensor:
    """R -> R, used by cut operators; its gradient is summed over ranks."""
    _never("tp_enter")


@torch.library.custom_op("hydragraph::tp_sum", mutates_args=())
def sum_parts(x: Tensor) -> Tensor:
    """P -> R; its gradient is the same on every rank."""
    _never("tp_sum")


@torch.library.custom_op("hydragraph::tp_max", mutates_args=())
def maximum(x: Tensor) -> Tensor:
    """Maximum over ranks, element by element; has no gradient."""
    _never("tp_max")


@torch.library.custom_op("hydragraph::tp_gather", mutates_args=())
def gather(x: Tensor, dim: int, ranks: int) -> Tensor:
    """S -> R along the token dimension, used by cut operators; its gradient is summed and scattered."""
    _never("tp_gather")


@torch.library.custom_op("hydragraph::tp_scatter", mutates_args=())
def scatter(x: Tensor, dim: int, ranks: int) -> Tensor:
    """P -> S along the token dimension; its gradient is gathered."""
    _never("tp_scatter")


@torch.library.custom_op("hydragraph::tp_split", mutates_args=())
def split(x: Tensor, dim: int, ranks: int) -> Tensor:
    """R -> S: keep this rank's tokens; its gradient is gathered, so that what made x gets the whole of it."""
    _never("tp_split")


@torch.library.custom_op("hydragraph::tp_join", mutates_args=())
def join(x: Tensor, dim: int, ranks: int) -> Tensor:
    """S -> R for operators that every rank repeats; the gradient keeps this rank's tokens."""
    _never("tp_join")


@torch.library.custom_op("hydragraph::tp_head_loss", mutates_args=())
def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, ignored: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """R, cut rows of the head from `start` -> the loss (R), and the gradients of hidden (P) and of these rows.

    `rows`: about how many a rank has, the same number on all of them.
    """
    _never("tp_head_loss")


# What is received is contiguous, whatever strides were sent.
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _longer(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s * ranks if d == dim else s for d, s in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s // ranks if d == dim else s for d, s in enumerate(x.shape)])


# Shapes for the trace: nothing here moves data.
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


# tp_max has none: the only maximum, of logits, cancels in the loss.
enter.register_autograd(_backward("tp_sum"), setup_context=_keep)
sum_parts.register_autograd(lambda ctx, gradient: gradient, setup_context=_keep)
gather.register_autograd(_backward("tp_scatter"), setup_context=_keep)
scatter.register_autograd(_backward("tp_gather"), setup_context=_keep)
split.register_autograd(_backward("tp_join"), setup_context=_keep)
join.register_autograd(_backward("tp_split"), setup_context=_keep)

head_loss.register_fake(lambda hidden, weight, labels, start, ignored, rows: like_gradients(hidden, weight))
head_loss.register_autograd(scale_gradients, setup_context=keep_gradients)

# What each becomes, once both directions are traced: a method of the object that the runtime passes.
METHODS = {
    torch.ops.hydragraph.tp_sum.default: "all_reduce",
    torch.ops.hydragraph.tp_max.default: "all_reduce_max",
    torch.ops.hydragraph.tp_gather.default: "all_gather",
    torch.ops.hydragraph.tp_join.default: "all_gather",
    torch.ops.hydragraph.tp_scatter.default: "reduce_scatter",
    torch.ops.hydragraph.tp_split.default: "split",
    torch.ops.hydragraph.tp_head_loss.default: "head_loss",
}
IDENTITY = torch.ops.hydragraph.tp_enter.default

"""Tensor-parallel collectives as operators of the forward graph, and their backwards.

After differentiation, the runtime's `collectives` replace these operators. R is a replicated value, P a partial sum,
and S a value sharded by tokens.

               forward             backward
    tp_enter   R -> R  no-op       P -> R  all_reduce
    tp_sum     P -> R  all_reduce  R -> R  no-op
    tp_gather  S -> R  all_gather  P -> S  reduce_scatter
    tp_scatter P -> S  reduce_sc.  S -> R  all_gather
    tp_split   R -> S  split       S -> R  all_gather
    tp_join    S -> R  all_gather  R -> S  split
    tp_max     R -> R  maximum     none
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_autograd, register_fake

from hydragraph.kernels.linear_cross_entropy import keep_gradients, like_gradients, scale_gradients
from hydragraph.kernels.linear_token_losses import keep_operands, like_losses, token_gradients

# Collectives that multiply (divide) a dimension by the number of ranks, and their backwards.
_LONGER = {"tp_gather": "tp_scatter", "tp_join": "tp_split"}
_SHORTER = {"tp_scatter": "tp_gather", "tp_split": "tp_join"}
_HEAD = "Tensor hidden, Tensor weight, Tensor labels, Tensor start, SymInt ignored, SymInt rows"

for _name in ("tp_enter", "tp_sum", "tp_max"):
    define(f"hydragraph::{_name}", "(Tensor x) -> Tensor")
for _name in _LONGER | _SHORTER:
    define(f"hydragraph::{_name}", "(Tensor x, SymInt dim, SymInt ranks) -> Tensor")
# `weight`: this rank's rows of the head, from row `start`. `rows`: approximate rows per rank, equal
# on all ranks. `classes`: rows of all ranks. Results: loss (R), gradients of `hidden` (P) and
# `weight`.
define("hydragraph::tp_head_loss", f"({_HEAD}, float smoothing, SymInt classes) -> (Tensor, Tensor, Tensor)")
# Results: each token's loss and log-sum-exp (R).
define("hydragraph::tp_head_token_losses", f"({_HEAD}) -> (Tensor, Tensor)")


# Collectives return contiguous tensors.
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _longer(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s * ranks if d == dim else s for d, s in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([s // ranks if d == dim else s for d, s in enumerate(x.shape)])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.geometry = inputs[1:]


def _backward(name: str) -> Any:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op = getattr(torch.ops.hydragraph, name)
        return (op(gradient, *ctx.geometry), *(None for _ in ctx.geometry))

    return backward


# tp_max has no backward: the maximum cancels in the loss.
for _name in ("tp_enter", "tp_sum", "tp_max"):
    register_fake(f"hydragraph::{_name}", _like)
for _name, _reverse in (_LONGER | _SHORTER).items():
    register_fake(f"hydragraph::{_name}", _longer if _name in _LONGER else _shorter)
    register_autograd(f"hydragraph::{_name}", _backward(_reverse), setup_context=_keep)
register_autograd("hydragraph::tp_enter", _backward("tp_sum"), setup_context=_keep)
register_autograd("hydragraph::tp_sum", lambda ctx, gradient: gradient)

register_fake("hydragraph::tp_head_loss", lambda hidden, weight, *_: like_gradients(hidden, weight))
register_autograd("hydragraph::tp_head_loss", scale_gradients, setup_context=keep_gradients)

register_fake("hydragraph::tp_head_token_losses", lambda hidden, *_: like_losses(hidden))
# The backward of tp_head_token_losses does not communicate: `hidden` gets a partial sum (P).
register_autograd("hydragraph::tp_head_token_losses", token_gradients, setup_context=keep_operands)

# Inserted by `sums_in_pieces`
SUMMED = "all_reduce_product"
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
# collective -> n: in a ring of t ranks, each sends n (t - 1) / t unsharded tensors (Patarasuk and
# Yuan, 2009). A sharded head's few numbers per token are not counted.
SENT = {
    "all_reduce": 2,
    SUMMED: 2,
    "all_reduce_max": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "split": 0,
    "head_loss": 0,
    "head_token_losses": 0,
}
STARTS = {name: f"start_{name}" for name in ("all_reduce", SUMMED, "all_gather", "reduce_scatter")}  # can overlap
RESULT = "result"
IDENTITY = torch.ops.hydragraph.tp_enter.default

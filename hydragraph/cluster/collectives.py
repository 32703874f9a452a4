"""Collectives of one stage's ranks, called by compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hydragraph.cluster.message_in_flight import Message, Staging
from hydragraph.kernels.linear_cross_entropy import Exchange, combine, loss_and_gradients, target_of
from hydragraph.kernels.linear_token_losses import losses_of
from hydragraph.spec.stage_kind import PIECES

Guard = Callable[[], AbstractContextManager[None]]
Wait = Callable[[Message], None]
Result = TypeVar("Result")

# Up to this size, ranks exchange tensors and add locally: 0.1 ms for 16 B; gloo's all-reduce takes 0.7-2 ms
_EXCHANGE_BYTES_PAIR = 256 * 1024  # 2 ranks
_EXCHANGE_BYTES = 64 * 1024  # more ranks


def _wait(message: Message) -> None:
    message.work.wait()


class LossCollectives(Protocol):
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...


@dataclass(frozen=True)
class StartedCollective:
    """Collective in progress; call `result` once, and keep `operands` alive until then."""

    result: Callable[[], Tensor]
    operands: object = None


class SumsProducts:
    """Mixin that splits a matrix product by rows, and all-reduces one piece while computing the next."""

    def start_all_reduce_product(self, factors: Sequence[Tensor], weights: Sequence[Tensor]) -> StartedCollective:
        """Start the sum over all pairs and ranks of x @ w, with `factors` x [T, K] and `weights` w [K, N]."""
        # whole: [T, N]; `piece` is a view of some of its rows, `rows` are the
        #   same rows of each x.
        whole = factors[0].new_empty(factors[0].shape[0], weights[0].shape[1])
        started = []
        with torch.no_grad():
            for piece, *rows in zip(*(x.tensor_split(PIECES) for x in (whole, *factors)), strict=True):
                if not len(piece):
                    continue
                torch.mm(rows[0], weights[0], out=piece)
                for x, w in zip(rows[1:], weights[1:], strict=True):
                    piece.addmm_(x, w)
                started.append(self._start_sum(piece))

        def result() -> Tensor:
            for each in started:
                each.result()
            return whole

        return StartedCollective(result, whole)

    def _start_sum(self, x: Tensor) -> StartedCollective:
        # `start_all_reduce` returns a new tensor, but the caller needs the
        # sum in this view of `whole`.
        # pyrefly: ignore[missing-attribute]  # of the subclass
        started: StartedCollective = self.start_all_reduce(x.clone())
        return StartedCollective(lambda: x.copy_(started.result()))


class StartsAtOnce(SumsProducts):
    """Mixin whose `start_` methods block until completion."""

    def start_all_reduce(self, x: Tensor) -> StartedCollective:
        return self._ended("all_reduce", x)

    def start_all_gather(self, x: Tensor, dim: int) -> StartedCollective:
        return self._ended("all_gather", x, dim)

    def start_reduce_scatter(self, x: Tensor, dim: int) -> StartedCollective:
        return self._ended("reduce_scatter", x, dim)

    def _ended(self, method: str, *arguments: Any) -> StartedCollective:
        result = getattr(self, method)(*arguments)
        return StartedCollective(lambda: result)


def head_loss(
    collectives: LossCollectives,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    start: Tensor,
    ignored: int,
    rows: int,
    smoothing: float = 0.0,
    classes: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a head's loss, this rank's term of the gradient of `hidden`, and the gradient of `weight`.

    `weight` has the head's rows from row `start`. `rows`, their approximate number per rank, is equal on all ranks.
    """
    exchange = _exchange_of(collectives)
    target = target_of(smoothing, classes)
    return loss_and_gradients(hidden, weight, labels, ignored, rows, int(start), exchange, target)


def head_token_losses(
    collectives: LossCollectives, hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, ignored: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and the log-sum-exp of its logits."""
    return losses_of(hidden, weight, labels, ignored, rows, int(start), _exchange_of(collectives))


def _exchange_of(collectives: LossCollectives) -> Exchange:
    return lambda statistics: combine(collectives.all_gather(statistics[None], 0))


@dataclass(frozen=True)
class Collectives(SumsProducts):
    """Collectives within one stage.

    All ranks call the same methods in the same order, with tensors of equal shape. Each method returns a new tensor.
    Reductions are bitwise equal on every rank. `start_` methods do not wait.

    Attributes:
        ranks: the stage's ranks, in the order of shards.
        group: communicator of `ranks`; None for a single rank.
        native: whether the backend's collectives send even small tensors.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    guard: Guard = nullcontext
    wait: Wait = _wait
    native: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; small half-precision tensors are added in fp32."""
        return self.start_all_reduce(x).result()

    def start_all_reduce(self, x: Tensor) -> StartedCollective:
        # Exchange small tensors: all ranks send x to all, and add all parts.
        if self._exchanges(x):
            return self._exchange([x] * self.size, _sum)
        return self._native_all_reduce(x.clone(memory_format=torch.contiguous_format), dist.ReduceOp.SUM)

    def _start_sum(self, x: Tensor) -> StartedCollective:
        return super()._start_sum(x) if self._exchanges(x) else self._native_all_reduce(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        if self._exchanges(x):
            return self._exchange([x] * self.size, lambda parts: torch.stack(parts).amax(0)).result()
        x = x.clone(memory_format=torch.contiguous_format)
        return self._native_all_reduce(x, dist.ReduceOp.MAX).result()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of `ranks`."""
        return self.start_all_gather(x, dim).result()

    def start_all_gather(self, x: Tensor, dim: int) -> StartedCollective:
        if self._exchanges(x):
            return self._exchange([x] * self.size, lambda parts: torch.cat(parts, dim))
        assert self.group is not None
        x = x.contiguous()
        # out: [size, *x.shape]; out[i] is from the i-th lowest rank, because
        #   groups sort their ranks.
        out = x.new_empty((self.size, *x.shape))
        with torch.no_grad(), self.guard():
            work = all_gather(out.view(-1), x.view(-1), self.group)

        def result() -> Tensor:
            self.wait(Message(work))
            # Ranks (4, 1) gather in the group's order (1, 4), so rank 4's part is
            #   out[1] and comes first.
            places = sorted(self.ranks)
            return torch.cat([out[places.index(rank)] for rank in self.ranks], dim)

        return StartedCollective(result, x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(x, dim).result()

    def start_reduce_scatter(self, x: Tensor, dim: int) -> StartedCollective:
        parts = self._parts(x, dim)
        if self.size == 1 or not self.native:
            # `_exchange` adds in a fixed order, and sends no more bytes than gloo's reduce-scatter.
            return self._exchange(parts, _sum)
        assert self.group is not None
        # `self.group` orders ranks ascending, unlike `self.ranks`.
        by_group = torch.stack([parts[self.ranks.index(rank)] for rank in sorted(self.ranks)])
        out = torch.empty_like(by_group[0])
        with torch.no_grad(), self.guard():
            work = reduce_scatter(out.view(-1), by_group.view(-1), self.group)
        return StartedCollective(lambda: self._ended([work], out), by_group)

    def split(self, x: Tensor, dim: int) -> Tensor:
        return self._parts(x, dim)[self.index].clone(memory_format=torch.contiguous_format)

    head_loss = head_loss
    head_token_losses = head_token_losses

    def _parts(self, x: Tensor, dim: int) -> Sequence[Tensor]:
        if x.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} is not divisible by {self.size} ranks: pad it")
        return x.chunk(self.size, dim)

    def _exchanges(self, x: Tensor) -> bool:
        limit = _EXCHANGE_BYTES_PAIR if self.size == 2 else _EXCHANGE_BYTES
        return self.size == 1 or (not self.native and x.numel() * x.element_size() <= limit)

    def _native_all_reduce(self, out: Tensor, operation: dist.ReduceOp.RedOpType) -> StartedCollective:
        with torch.no_grad(), self.guard():
            work = dist.all_reduce(out, operation, group=self.group, async_op=True)
        return StartedCollective(lambda: self._ended([work], out))

    def _exchange(self, parts: Sequence[Tensor], combine: Callable[[list[Tensor]], Tensor]) -> StartedCollective:
        # parts: one tensor per place. Each rank gets its place's tensors, in the order of
        # `self.ranks`, so that all add alike.
        mine = parts[self.index].contiguous()
        received = [mine if rank == self.rank else torch.empty_like(mine) for rank in self.ranks]
        sent = [part.contiguous() for part in parts]
        works: list[dist.Work | None] = []
        with torch.no_grad(), self.guard():
            for place, rank in enumerate(self.ranks):
                if rank != self.rank:
                    # Only `_ended` waits for messages, so their order cannot deadlock.
                    works.append(dist.irecv(received[place], rank, self.group))
                    works.append(dist.isend(sent[place], rank, self.group))
        return StartedCollective(lambda: combine(self._ended(works, received)), sent)

    def _ended(self, works: Sequence[dist.Work | None], result: Result) -> Result:
        for work in works:
            assert work is not None
            self.wait(Message(work))
        return result


class StagedCollectives(StartsAtOnce):
    def __init__(self, host: Collectives, staging: Staging) -> None:
        self._host = host
        self._staging = staging

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._back(self._host.all_reduce(self._staging.outgoing(x)), x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._back(self._host.all_reduce_max(self._staging.outgoing(x)), x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._back(self._host.all_gather(self._staging.outgoing(x), dim), x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._back(self._host.reduce_scatter(self._staging.outgoing(x), dim), x)

    def split(self, x: Tensor, dim: int) -> Tensor:
        return self._host.split(x, dim)

    head_token_losses = head_token_losses
    head_loss = head_loss

    def _back(self, host: Tensor, like: Tensor) -> Tensor:
        return host.to(like.device)


AnyCollectives = Collectives | StagedCollectives


def _sum(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    # Half-precision parts are added in fp32, and rounded once.
    total = first.to(torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def all_gather(out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of `inp` into `out`, in the group's order along dim 0."""
    # PyTorch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor`.
    function: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(out, inp, group=group, async_op=True)


def reduce_scatter(out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of `inp` into `out`, in the group's order along dim 0."""
    function: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(out, inp, group=group, async_op=True)

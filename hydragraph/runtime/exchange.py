"""Execution of links (transfers of a bucket to another layout), each as one collective of all ranks.

A push to a home with two copies has two links: on the first, first owners sum all ranks' gradients; on the second, they
send the sums to second owners. Gradients are summed in rank order, so repeated steps are bitwise equal.

    source buffer --gather--> outgoing --all-to-all--> incoming --scatter--> target buffer
    [source]                  [sum(sent)]              [sum(received)]       [target]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.message_in_flight import Message
from hydragraph.ir.layout import Ints, Layout
from hydragraph.ir.link import Slices, copy, hand_on, is_all_gather, is_reduce_scatter, reduce, stays, sums_stay
from hydragraph.kernels.exact_sums import joined
from hydragraph.kernels.slice_copy import SliceTable, slice_copy
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.pending_work import Finish

Piece = tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a link.

    Attributes:
        sends: pieces of the local source, ordered by peer, including this rank.
        receives: pieces of the local target, in the same order.
        sent: elements per receiving peer.
        received: elements per sending peer.
        native: "all_gather" or "reduce_scatter" if one needs no intermediate buffers.
        stays: whether all data stays on its rank.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    source: int
    target: int
    native: str | None = None
    source_at: int = 0
    target_at: int = 0
    stays: bool = False
    device: torch.device = field(default=torch.device("cpu"), compare=False)

    @cached_property
    def gather(self) -> SliceTable:
        # Each piece begins where the earlier ones end.
        at, length = _columns(self.sends)
        return SliceTable.make(at, length.cumsum(0) - length, length, device=self.device)

    @cached_property
    def scatter(self) -> SliceTable:
        at, length = _columns(self.receives)
        return SliceTable.make(length.cumsum(0) - length, at, length, sums=True, device=self.device)

    @cached_property
    def whole(self) -> int:
        """The number of sending peers if each sends the whole target in order; otherwise 0."""
        peers = sum(map(bool, self.received))
        if any(length not in (0, self.target) for length in self.received):
            return 0
        at = 0
        for offset, length in self.receives:  # ordered by peer
            # All pieces from one peer must form one row of `incoming`.
            if offset != at % self.target:
                return 0
            at += length
        return peers

    @property
    def is_identity(self) -> bool:
        whole = ((0, self.source),)
        return (
            self.native is None and self.source == self.target and self.sends == self.receives == whole and self.stays
        )

    @property
    def in_order(self) -> bool:
        """Whether data arrives in the target's order and can be received in place."""
        return _is_whole(self.receives, self.target)


def pull_exchange(
    source: Layout, target: Layout, rank: int, ranks: int, device: torch.device | None = None
) -> Exchange:
    native = "all_gather" if is_all_gather(source, target) and len(source.ranks) == ranks > 1 else None
    ends = (0, source.local_size(rank)), (0, target.local_size(rank))
    lowered = _lower(copy(source, target, rank), *ends, rank, ranks, device)
    return replace(lowered, native=native, stays=stays(source, target))


def push_exchange(
    source: Layout, target: Layout, rank: int, ranks: int, device: torch.device | None = None
) -> Exchange:
    native = "reduce_scatter" if is_reduce_scatter(source, target) and len(target.ranks) == ranks > 1 else None
    # Only first owners sum, so the target is this rank's part of the first copy.
    first = target.first.of(rank)
    ends = (0, source.local_size(rank)), _span(first.at, first.hi - first.lo)
    lowered = _lower(reduce(source, target, rank), *ends, rank, ranks, device)
    return replace(lowered, native=native, stays=sums_stay(source, target))


def hand_exchange(owners: Layout, rank: int, ranks: int, device: torch.device | None = None) -> Exchange | None:
    """Return the exchange from first to second owners within one buffer; None without second owners."""
    if not len(owners.second.rank):
        return None
    slices = hand_on(owners, rank)
    sends, receives = slices.of(rank)
    ends = _span(sends.src_at, sends.hi - sends.lo), _span(receives.dst_at, receives.hi - receives.lo)
    return _lower(slices, *ends, rank, ranks, device)


def _lower(
    slices: Slices, source: Piece, target: Piece, rank: int, ranks: int, device: torch.device | None
) -> Exchange:
    sends, receives = slices.of(rank)
    return Exchange(
        _pieces(sends.src_at - source[0], sends.hi - sends.lo),
        _pieces(receives.dst_at - target[0], receives.hi - receives.lo),
        _per_peer(sends.dst, sends.hi - sends.lo, ranks),
        _per_peer(receives.src, receives.hi - receives.lo, ranks),
        source=source[1],
        target=target[1],
        source_at=source[0],
        target_at=target[0],
        device=device or torch.device("cpu"),
    )


def _span(at: Ints, length: Ints) -> Piece:
    if not len(at):
        return 0, 0
    first = int(at.min())
    return first, int((at + length).max()) - first


def _columns(pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pieces, dtype=torch.int64).view(-1, 2)
    return both[:, 0], both[:, 1]


def _pieces(at: np.ndarray, length: np.ndarray) -> tuple[Piece, ...]:
    return tuple(zip(at.tolist(), length.tolist(), strict=True))


def _per_peer(peer: np.ndarray, length: np.ndarray, ranks: int) -> tuple[int, ...]:
    return tuple(np.bincount(peer, weights=length, minlength=ranks).astype(np.int64).tolist())


@dataclass(frozen=True, eq=False)
class Transfer:
    """Execution of an exchange; methods start it, and return a function that waits for its end."""

    exchange: Exchange
    groups: Groups
    buffers: Buffers

    def push(
        self,
        gradients: Tensor,
        home: Tensor,
        handing: Exchange | None = None,
        dtype: torch.dtype = torch.float32,
        adds: bool = False,
    ) -> Finish:
        """Move gradients and store their rank-ordered sum in `home`.

        Args:
            gradients: this rank's 1-D contribution, possibly empty; it returns to `buffers` once sent.
            home: this rank's 1-D gradient shard, of equal dtype.
            handing: exchange that sends the sums to second owners.
            dtype: dtype in which gradients are sent.
            adds: add to `home` instead of overwriting it.
        """
        target = _part(home, self.exchange.target_at, self.exchange.target)
        push = self._added if adds and gradients is not home else self._summed
        return self._handed_on(push(gradients, target, dtype), handing, home)

    def exact_push(self, parts: Sequence[Tensor], home: Tensor, handing: Exchange | None = None) -> Finish:
        """Move exact sums (`kernels.exact_sums`) and store their rounded totals in `home`.

        Args:
            parts: this rank's 1-D fp64 sums, each possibly empty; they return to `buffers` once sent.
            home: this rank's 1-D fp32 gradient shard, overwritten.
            handing: as for `push`, after rounding.
        """
        totals = [self.buffers.take(self.exchange.target, torch.float64) for _ in parts]
        pushes = [self._summed(part, total, torch.float64) for part, total in zip(parts, totals, strict=True)]

        def finish() -> Tensor:
            for push in pushes:
                push()
            joined(totals, _part(home, self.exchange.target_at, self.exchange.target))
            for total in totals:
                self.buffers.give(total)
            return home

        # Messages of the same communicator complete in order
        push = Finish(finish, pushes[-1].message)
        return self._handed_on(push, handing, home)

    def _handed_on(self, push: Finish, handing: Exchange | None, home: Tensor) -> Finish:
        if handing is None:
            return push
        transfer = Transfer(handing, self.groups, self.buffers)
        return replace(push, then=lambda: transfer._handed(home))

    def pull(self, home: Tensor, dtype: torch.dtype) -> Finish:
        """Move values into a 1-D tensor of `dtype` from `buffers`.

        If no element moves or changes, return `home` itself.
        """
        exchange, buffers = self.exchange, self.buffers
        if exchange.is_identity and home.dtype == dtype:
            return Finish(lambda: home)
        if exchange.native:
            target = buffers.take(exchange.target, dtype)
            outgoing = home.to(dtype)
            message = self.groups.all_gather(Channel.PULL, target, outgoing)
            return self._finish(message, lambda: target, outgoing)
        outgoing = self._gathered(home, dtype)
        # All gathered data stays on this rank, in order, so it is the target.
        if exchange.stays and exchange.in_order:
            return Finish(lambda: outgoing)
        incoming = buffers.take(sum(exchange.received), dtype)
        message = self._send(Channel.PULL, incoming, outgoing)
        if exchange.in_order:
            return self._finish(message, lambda: incoming, outgoing)

        def scatter() -> Tensor:
            target = buffers.take(exchange.target, dtype)
            slice_copy(incoming, target, exchange.scatter)
            buffers.give(incoming)
            return target

        return self._finish(message, scatter, outgoing)

    def _added(self, gradients: Tensor, home: Tensor, dtype: torch.dtype) -> Finish:
        # A streamed bucket's first push overwrites the home, later pushes add to it.
        stays = self.exchange.is_identity
        sums = gradients if stays else self.buffers.take(len(home))
        push = Finish(lambda: gradients) if stays else self._summed(gradients, sums, dtype)

        def add() -> Tensor:
            home.add_(push())
            self.buffers.give(sums)
            return home

        return Finish(add, push.message)

    def _summed(self, gradients: Tensor, home: Tensor, dtype: torch.dtype) -> Finish:
        exchange, groups, buffers = self.exchange, self.groups, self.buffers
        if exchange.is_identity:

            def stay() -> Tensor:
                if gradients is not home:
                    home.copy_(gradients)
                    buffers.give(gradients)
                return home

            return Finish(stay)
        if exchange.stays:
            dtype = home.dtype  # gradients are rounded only if they are sent
        # gloo's own reduce-scatter copies its input.
        if exchange.native and dtype == home.dtype and groups.world.backend == "nccl":
            message = groups.reduce_scatter(Channel.PUSH, home, gradients)
            return self._finish(message, lambda: home, gradients)
        # To lower peak memory, give `gradients` back before taking `incoming`.
        outgoing = self._gathered(gradients, dtype)
        if outgoing is not gradients:
            buffers.give(gradients)
        # Every element has exactly one contribution
        if exchange.in_order and dtype == home.dtype:
            return self._finish(self._send(Channel.PUSH, home, outgoing), lambda: home, outgoing)
        incoming = buffers.take(sum(exchange.received), dtype)
        message = self._send(Channel.PUSH, incoming, outgoing)

        def add() -> Tensor:
            # If every peer sends all elements, `incoming` is [peers, elements]; otherwise,
            # slices are added one by one. Both sum in rank order.
            if exchange.whole > 1:
                _sum(incoming.view(exchange.whole, -1), home)
            else:
                home.zero_()
                slice_copy(incoming, home, exchange.scatter, accumulate=True)
            buffers.give(incoming)
            return home

        return self._finish(message, add, outgoing)

    def _handed(self, home: Tensor) -> Finish:
        exchange = self.exchange
        target = _part(home, exchange.target_at, exchange.target)
        outgoing = self._gathered(_part(home, exchange.source_at, exchange.source), home.dtype)
        incoming = target if exchange.in_order else self.buffers.take(sum(exchange.received), home.dtype)
        # Ranks interleave sums and pushes differently, so sums need their own channel.
        message = self._send(Channel.COMMIT, incoming, outgoing)

        def put() -> Tensor:
            if incoming is not target:
                slice_copy(incoming, target, exchange.scatter)
                self.buffers.give(incoming)
            return home

        return self._finish(message, put, outgoing)

    def _send(self, channel: Channel, incoming: Tensor, outgoing: Tensor) -> Message | None:
        if self.exchange.stays:
            incoming.copy_(outgoing)
            return None
        return self.groups.all_to_all(channel, incoming, outgoing, self.exchange.received, self.exchange.sent)

    def _gathered(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        if buffer.dtype == dtype and _is_whole(self.exchange.sends, len(buffer)):
            return buffer
        gathered = self.buffers.take(sum(self.exchange.sent), dtype)
        slice_copy(buffer, gathered, self.exchange.gather)
        return gathered

    def _finish(self, message: Message | None, result: Callable[[], Tensor], outgoing: Tensor) -> Finish:

        def finish() -> Tensor:
            self.groups.wait(message)
            self.buffers.give(outgoing)
            return result()

        return Finish(finish, message)


def _part(buffer: Tensor, at: int, size: int) -> Tensor:
    return buffer if size == len(buffer) else buffer[at : at + size]


def _sum(rows: Tensor, into: Tensor) -> None:
    # Begin with two rows' sum, or the first one's cast, to save a pass over memory.
    if rows.dtype == into.dtype:
        torch.add(rows[0], rows[1], out=into)
        rows = rows[2:]
    else:
        into.copy_(rows[0])
        rows = rows[1:]
    for row in rows:
        into.add_(row)


def _is_whole(pieces: Sequence[Piece], size: int) -> bool:
    at = 0
    for offset, length in pieces:
        if offset != at:
            return False
        at += length
    return at == size

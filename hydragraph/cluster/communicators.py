"""An executable's communicators.

Each kind of traffic has its own communicator, because a connection is a queue: after 64 MB of weights, a 4-byte message
to the same peer waits 17-45 ms in the same gloo group, but 0.2-2.7 ms in another.

    communicator      ranks               traffic                       ordered by
    Channel.PULL      all ranks           weights from owners           the programs' pulls
    Channel.PUSH      all ranks           gradients to owners           the programs' pushes
    Channel.COMMIT    all ranks           totals of a step, objects     calls
                                          gradients to second owners    the programs' pushes, before the totals
    Channel.MOVE      all ranks           state moved during a step     windows of state; created if needed
    Channel.UP        all ranks           messages to higher ranks      sends, per pair of ranks
    Channel.DOWN      all ranks           messages to lower ranks       sends, per pair of ranks
    tp-0-1-...        ranks of one stage  collectives of its graphs     the stage's instructions

Under NCCL, pulls, pushes and moves use few multiprocessors. All other traffic has high priority, because computation
waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hydragraph.cluster.collectives import (
    AnyCollectives,
    Collectives,
    StagedCollectives,
    all_gather,
    reduce_scatter,
)
from hydragraph.cluster.connecting import Pair, connecting_order, pairs
from hydragraph.cluster.launch import World
from hydragraph.cluster.message_in_flight import CombinedWork, Message, Operation, Staging
from hydragraph.ir.rank_program import RankProgram
from hydragraph.private.process_groups import abort_together, drop, nccl_options, unbound

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


# Maximum peers in a grouped NCCL operation, which has buffers for each
_GROUPED = 32
# Bytes of the first message of `Groups.tell`, and of the length field at its start
_TOLD = 1 << 14
_LENGTH = 8


class Channel(Enum):
    """Kind of traffic; UP and DOWN are separate, because an NCCL communicator has one queue per pair of ranks."""

    PULL = "pull"
    PUSH = "push"
    COMMIT = "commit"
    MOVE = "move"
    UP = "up"
    DOWN = "down"


class Groups:
    """Communicators of one executable.

    All ranks call collective methods in the same order. For a single rank, they copy their input and return None.
    """

    def __init__(self, world: World, timeout: timedelta, *, capacity: int = 64) -> None:
        self.world = world
        self._timeout = timeout
        self._watch = world.watch
        self._capacity = capacity
        self._guard = world.watch.communicating
        self._waiter = world.watch.waiter()
        self._staging = Staging(world.device) if world.backend == "gloo" and world.device.type != "cpu" else None
        self.waited_s = 0.0
        self.closed = False
        # Number of `reduce_to_host` calls, equal on all ranks
        self._reductions = 0
        # Broadcasts that some ranks may not have received
        self._told: tuple[Message, ...] = ()
        self._channels: dict[Channel, dist.ProcessGroup] = {}
        # Groups by sorted ranks, None if this rank is not a member; least recently used first, in equal order on all
        # ranks
        self._tensor_parallel: OrderedDict[tuple[int, ...], dist.ProcessGroup | None] = OrderedDict()
        self._pairs: set[Pair] = set()
        if world.ranks > 1:
            began = time.perf_counter()
            # A rank may be lost meanwhile
            self._watch.also_abort(self.abort)
            with self._watch.guarding():
                for channel in Channel:
                    if channel is not Channel.MOVE:
                        self._channels[channel] = self._of_all(channel)
                self._settle()
                # `Channel.UP` and `Channel.DOWN` connect later, by pairs (`connect`).
                self._connect(*(self._channels[channel] for channel in (Channel.PULL, Channel.PUSH, Channel.COMMIT)))
            seconds = time.perf_counter() - began
            _LOG.info("created the communicators of %d ranks over %s in %.2f s", world.ranks, world.backend, seconds)

    def call(self, function: Callable[[], T]) -> T:
        return self._watch.call(function, self._waiter)

    def _of_all(self, channel: Channel) -> dist.ProcessGroup:
        group = self._new(channel.value, tuple(range(self.world.ranks)))
        assert group is not None
        return group

    def _new(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        background = {Channel.PULL.value, Channel.PUSH.value, Channel.MOVE.value}
        options = nccl_options(self._timeout, name not in background) if self.world.backend == "nccl" else None
        settings: dict[str, Any] = {"timeout": self._timeout, "backend": self.world.backend, "pg_options": options}
        # With use_local_synchronization, ranks in different numbers of groups would name a group differently. A group
        # bound to a device has one communicator for all pairs, which can deadlock.
        with unbound():
            group = self.call(lambda: dist.new_group(list(ranks), group_desc=f"hydragraph-{name}", **settings))
        return group if isinstance(group, dist.ProcessGroup) else None

    def _settle(self) -> None:
        """Wait for all ranks: an early exit breaks connections that others are still opening."""
        self.gather(None)

    def open_moving(self) -> None:
        """Create `Channel.MOVE` (collective call)."""
        if self.world.ranks == 1 or Channel.MOVE in self._channels:
            return
        with self._watch.guarding():
            self._channels[Channel.MOVE] = self._of_all(Channel.MOVE)
            self._settle()
            self._connect(self._channels[Channel.MOVE])

    def _connect(self, *groups: dist.ProcessGroup) -> None:
        """Connect NCCL's communicators by a first operation, which blocks the host until all members take part."""
        if self.world.backend == "nccl":
            for group in groups:
                self.call(partial(_first, partial(dist.all_reduce, group=group), self.world.device))

    def connect(self, program: RankProgram) -> None:
        """Connect this rank with its program's peers (collective call)."""
        if self.world.backend != "nccl":
            # Gloo has already connected all ranks
            return
        rank = self.world.rank
        # A pair's first operation blocks both ranks. With one global order of pairs, both ends of
        # the first unconnected pair wait for each other, so waits cannot form a cycle.
        for pair in sorted(pairs(program) - self._pairs, key=connecting_order):
            source, destination = pair
            group = self._direction(source, destination)
            sends = partial(dist.send, dst=destination, group=group)
            receives = partial(dist.recv, src=source, group=group)
            self.call(partial(_first, sends if rank == source else receives, self.world.device))
            self._pairs.add(pair)

    @property
    def _object_group(self) -> dist.ProcessGroup | None:
        return self._channels[Channel.COMMIT] if self.world.backend == "gloo" else self.world.objects

    def wait(self, message: Message | None) -> None:
        """Wait until an operation is complete; under NCCL, only the current stream waits."""
        if message is None:
            return
        began = time.perf_counter()
        # gloo's wait on a broken connection may never end, so another thread waits.
        if self.world.backend == "nccl":
            with self._guard():
                message.work.wait()
        else:
            self._watch.wait(message.work, self._waiter)
        if message.landed is not None:
            message.landed()
        self.waited_s += time.perf_counter() - began

    def _move(self, out: Tensor, inp: Tensor, start: Callable[[Tensor, Tensor], dist.Work]) -> Message | None:
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        staging = self._staging
        if staging is None:
            return Message(start(out, inp))
        # gloo uses host memory. `landed` copies the result to the device
        # after the operation.
        arriving = staging.incoming(out)
        leaving = staging.outgoing(inp)
        return Message(start(arriving, leaving), lambda: staging.arrived(arriving, out), (arriving, leaving))

    def all_to_all(
        self, channel: Channel, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Message | None:
        """Start sending consecutive parts of `inp` to the ranks, and receiving their parts into `out`.

        Args:
            channel: its operations run in the order in which they start.
            out, inp: contiguous tensors, to keep alive until completion.
            out_splits, in_splits: sizes along dim 0 of the parts received from, and sent to, each rank.
        """
        if self.world.backend == "nccl" and self.world.ranks > _GROUPED:
            works = in_rounds(out, inp, out_splits, in_splits, self._channels[channel])
            return Message(works, kept=(inp, out))
        splits = list(out_splits), list(in_splits)

        def start(to: Tensor, of: Tensor) -> dist.Work:
            work: dist.Work = dist.all_to_all_single(to, of, *splits, self._channels[channel], async_op=True)
            return work

        return self._move(out, inp, start)

    def all_gather(self, channel: Channel, out: Tensor, inp: Tensor) -> Message | None:
        """Start an all-gather in rank order along dim 0; shapes are equal on all ranks."""
        return self._move(out, inp, lambda to, of: all_gather(to, of, self._channels[channel]))

    def reduce_scatter(self, channel: Channel, out: Tensor, inp: Tensor) -> Message | None:
        """Start a reduce-scatter in rank order along dim 0; shapes are equal on all ranks."""
        return self._move(out, inp, lambda to, of: reduce_scatter(to, of, self._channels[channel]))

    def all_reduce(
        self, channel: Channel, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce a tensor in place; the result is bitwise equal on every rank."""
        if self.world.ranks > 1:
            staging = self._staging
            host = tensor if staging is None else staging.outgoing(tensor)
            with self._guard():
                work = dist.all_reduce(host, operation, group=self._channels[channel], async_op=True)
            assert work is not None
            self.wait(Message(work, None if staging is None else lambda: staging.arrived(host, tensor)))

    def reduce_to_host(
        self, channel: Channel, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Like `all_reduce`, but return the result in host memory.

        After an abort, NCCL returns an undefined result without an error, so every rank adds a mark to the tensor, and
        a missing mark raises an error.
        """
        ranks = self.world.ranks
        if ranks == 1:
            return tensor.to("cpu", copy=True)
        self._reductions += 1
        # marks: [ranks], this rank's count at its place, else 0, so that SUM and MAX give
        #   all counts: rank 1 of 3 sends [0, 7, 0] with its 7th reduction, and must
        #   receive [7, 7, 7]
        marks = tensor.new_zeros(ranks)
        marks[self.world.rank] = self._reductions
        reduced = torch.cat([tensor.flatten(), marks])
        self.all_reduce(channel, reduced, operation)
        with self._watch.waiting():
            # Waits for the current stream
            on_host = reduced.to("cpu", copy=True)
        self._watch.check()
        if not bool((on_host[-ranks:] == self._reductions).all()):
            with self._guard():
                raise RuntimeError("a reduction ended before every rank took part: its communicator was aborted")
        return on_host[:-ranks].view(tensor.shape)

    def gather(self, value: T) -> list[T]:
        values = [value] * self.world.ranks
        if self.world.ranks > 1:
            self.call(lambda: dist.all_gather_object(values, value, self._object_group))
        return values

    def tell(self, value: T) -> T:
        """Return rank 0's small picklable value on every rank; rank 0 does not wait."""
        if self.world.ranks == 1:
            return value
        # Rank 0 first waits for its previous broadcasts, to free their tensors.
        for message in self._told:
            self.wait(message)
        self._told = ()
        leads = self.world.rank == 0
        content = pickle.dumps(value) if leads else b""
        data = len(content).to_bytes(_LENGTH, "little") + content
        messages: list[Message] = []

        def share(part: bytes, size: int) -> bytes:
            tensor = torch.zeros(size, dtype=torch.uint8)
            if leads:
                tensor[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            with self._guard():
                work = dist.broadcast(tensor, 0, group=self._object_group, async_op=True)
            assert work is not None
            messages.append(Message(work, kept=(tensor,)))
            if leads:
                return part
            self.wait(messages[-1])
            return tensor.numpy().tobytes()

        # Other ranks do not know the length, so the first broadcast has a fixed size and starts with
        # it; a second has the rest, if any.
        arrived = share(data[:_TOLD], _TOLD)
        length = _LENGTH + int.from_bytes(arrived[:_LENGTH], "little")
        if length > _TOLD:
            arrived += share(data[_TOLD:], length - _TOLD)
        if leads:
            self._told = tuple(messages)
            return value
        received: T = pickle.loads(arrived[_LENGTH:length])
        return received

    def same_everywhere(self, what: str, text: str) -> None:
        texts = self.gather(text)
        if len(set(texts)) > 1:
            ranks = {value: [rank for rank, other in enumerate(texts) if other == value] for value in texts}
            differing = "; ".join(f"{value!r} on ranks {which}" for value, which in ranks.items())
            raise ValueError(f"ranks differ in {what}: {differing}; give every rank the same {what}")

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Start sending a contiguous tensor, which must not change until completion.

        gloo matches sends and receives by tag, NCCL by their order per pair of ranks.
        """
        leaving = tensor if self._staging is None else self._staging.outgoing(tensor)
        work = dist.isend(leaving, peer, self._direction(self.world.rank, peer), tag)
        assert work is not None
        return Message(work, kept=(leaving,))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        staging = self._staging
        arriving = tensor if staging is None else staging.incoming(tensor)
        work = dist.irecv(arriving, peer, self._direction(peer, self.world.rank), tag)
        assert work is not None
        return Message(work, None if staging is None else lambda: staging.arrived(arriving, tensor), (arriving,))

    def _direction(self, source: int, destination: int) -> dist.ProcessGroup:
        assert source != destination, "a rank sends only to other ranks"
        return self._channels[Channel.UP if destination > source else Channel.DOWN]

    def tensor_parallel(self, rank_sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], AnyCollectives]:
        """Create missing communicators of stages; all ranks pass the same list.

        Args:
            rank_sets: each stage's ranks, in tensor-parallel order.

        Returns:
            The collectives of sets with this rank, valid until the next call.
        """
        # Stages with the same ranks, in any order, share a group.
        # needed: sorted ranks of each stage with several ranks, in the same order on all ranks
        needed = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in rank_sets if len(ranks) > 1))
        missing = [ranks for ranks in needed if ranks not in self._tensor_parallel]
        if missing:
            with self._watch.guarding():
                for ranks in missing:
                    # All ranks create every group, and get None for other ranks' groups.
                    self._tensor_parallel[ranks] = self._new("tp-" + "-".join(map(str, ranks)), ranks)
                self._settle()
                self._connect(*(group for ranks in missing if (group := self._tensor_parallel[ranks]) is not None))
            _LOG.info("created tensor-parallel communicators of ranks %s", " and ".join(map(str, missing)))
        for ranks in needed:
            self._tensor_parallel.move_to_end(ranks)
        self._evict(max(self._capacity, len(needed)))
        return {ranks: self._collectives(ranks) for ranks in rank_sets if self.world.rank in ranks}

    def _collectives(self, ranks: tuple[int, ...]) -> AnyCollectives:
        group = self._tensor_parallel[tuple(sorted(ranks))] if len(ranks) > 1 else None
        native = self.world.backend == "nccl"
        collectives = Collectives(ranks, self.world.rank, group, self._guard, self.wait, native)
        return collectives if group is None or self._staging is None else StagedCollectives(collectives, self._staging)

    def _evict(self, capacity: int) -> None:
        while len(self._tensor_parallel) > capacity:
            # All ranks have the same keys in the same order, so they destroy the same group.
            ranks, group = self._tensor_parallel.popitem(last=False)
            _LOG.info("closed the least recently used communicator (ranks %s): at most %d are kept", ranks, capacity)
            if group is not None:
                dist.destroy_process_group(group)

    def abort(self) -> None:
        """Abort pending NCCL operations, from any thread; gloo's operations end when their sockets are closed."""
        if self.world.backend == "nccl":
            abort_together(self._all())

    def close(self) -> None:
        self.closed = True
        groups = self._all()
        self._channels = {}
        self._tensor_parallel.clear()
        self._waiter.close()
        for group in groups:
            # A new rendezvous may have dropped all groups.
            with contextlib.suppress(ValueError):
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        if self._watch.broken:
            # gloo's destructor may wait forever
            drop(groups)

    def _all(self) -> list[dist.ProcessGroup]:
        # The copies are atomic: the watch's thread also calls `_all`.
        every = [*self._channels.copy().values(), *self._tensor_parallel.copy().values()]
        return [group for group in every if group is not None]


def _first(operation: Callable[[Tensor], object], device: torch.device) -> None:
    arrived = torch.ones(1, device=device)
    operation(arrived)
    arrived.item()


def in_rounds(
    out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: dist.ProcessGroup
) -> CombinedWork:
    """Start an all-to-all in rounds of at most `_GROUPED` peers, without empty messages."""
    leaving = inp.split(list(in_splits))
    arriving = out.split(list(out_splits))
    rank = group.rank()
    ranks = group.size()
    arriving[rank].copy_(leaving[rank])
    works: list[Operation] = []
    # In the round of distance d, a rank sends to rank + d and receives from rank - d. Sends meet
    # their receives in the same round, so rounds cannot wait for each other.
    for first in range(1, ranks, _GROUPED):
        operations = []
        for distance in range(first, min(first + _GROUPED, ranks)):
            ahead = (rank + distance) % ranks
            behind = (rank - distance) % ranks
            if len(leaving[ahead]):
                operations.append(dist.P2POp(dist.isend, leaving[ahead], ahead, group))
            if len(arriving[behind]):
                operations.append(dist.P2POp(dist.irecv, arriving[behind], behind, group))
        works += dist.batch_isend_irecv(operations) if operations else []
    return CombinedWork(tuple(works))

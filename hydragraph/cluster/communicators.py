"""The communicators of one executable: one for each kind of traffic, and one for each tensor-parallel group.

Traffic is kept apart because a connection is a queue: behind 64 MB of weights, a 4-byte message to the same peer waits
17-45 ms in one gloo group and 0.2-2.7 ms in two.

    communicator      of                  what travels                      in which order
    Role.PULL         all ranks           weights from their owners         of the programs' pulls
    Role.PUSH         all ranks           gradients to their owners         of the programs' pushes
    Role.COMMIT       all ranks           totals of a step, objects         of calls
                                          gradients to second owners        of the programs' pushes, before the totals,
                                                                            which must wait for them in any case
    Role.MOVE         all ranks           state that moves beside a step    of windows; made when state first moves so
    _Direction.UP     all ranks           stages' messages to higher ranks  of sends, per pair of ranks
    _Direction.DOWN   all ranks           stages' messages to lower ranks   likewise
    tp-0-1-...        ranks of one stage  what its graphs exchange          of the stage's instructions
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hydragraph.cluster.collectives import (
    AnyCollectives,
    Collectives,
    Guard,
    StagedCollectives,
    all_gather,
    reduce_scatter,
)
from hydragraph.cluster.connecting import Pair, connecting_order, pairs
from hydragraph.cluster.failure.rank_watch import Watch
from hydragraph.cluster.launch import World
from hydragraph.cluster.message_in_flight import Message, Operation, Staging, Works
from hydragraph.ir.rank_program import RankProgram
from hydragraph.private.process_groups import abort_together, drop, unbound

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


# Peers of one grouped operation under NCCL: each holds channel buffers while the group runs.
_GROUPED = 32
# Bytes of the message in which rank 0 tells something; what is longer takes another one. The first say how long it is.
_TOLD = 1 << 14
_LENGTH = 8


class Role(Enum):
    """A kind of traffic between all ranks."""

    PULL = "pull"  # weights from their owners
    PUSH = "push"  # gradients to their owners
    COMMIT = "commit"  # agreement before the update, and on programs before they run; sums for second owners
    MOVE = "move"  # state to other owners, beside a step


class _Direction(Enum):
    """Point-to-point traffic, apart by direction: NCCL has one queue per pair of ranks and communicator."""

    UP = "up"  # to a higher rank
    DOWN = "down"


class Groups:
    """All communicators of one executable; every rank makes them together, and calls methods that say so together.

    Alone (one rank), there is no process group: collectives copy their input to their output.

    Args:
        world: this process's place, from `join`.
        timeout: after how long an operation fails.
        watch: what tells an error of communication from one of ours, and ends waits. None: waits end with the timeout.
        capacity: how many tensor-parallel communicators to keep for later strategies.

    Attributes:
        waited_s: seconds in which this process has waited for messages, ever.
    """

    def __init__(self, world: World, timeout: timedelta, *, watch: Watch | None = None, capacity: int = 64) -> None:
        self.world = world
        self._timeout = timeout
        self._watch = watch
        self._capacity = capacity
        self._guard: Guard = nullcontext if watch is None else watch.communicating
        self._waiter = None if watch is None else watch.waiter()
        self._staging = Staging(world.device) if world.backend == "gloo" and world.device.type != "cpu" else None
        self.waited_s = 0.0
        self._reductions = 0  # to the host, counted alike on all ranks
        self._told: tuple[Message, ...] = ()  # by rank 0, of which some ranks may not have them yet
        self._roles: dict[Role, dist.ProcessGroup] = {}
        self._directions: dict[_Direction, dist.ProcessGroup] = {}
        # By sorted ranks, least recently used first; None where this rank is no member. The same keys in the same
        # order on all ranks, so that they make and drop groups together.
        self._tensor_parallel: OrderedDict[tuple[int, ...], dist.ProcessGroup | None] = OrderedDict()
        self._pairs: set[Pair] = set()  # of which this rank is one end, and which are connected
        if world.ranks > 1:
            began = time.perf_counter()
            if watch is not None:
                watch.also_abort(self.abort)  # before anything connects: a rank may be lost meanwhile
            with nullcontext() if watch is None else watch.guarding():
                for role in Role:
                    if role is not Role.MOVE:
                        self._roles[role] = self._of_all(role.value)
                for direction in _Direction:
                    self._directions[direction] = self._of_all(direction.value)
                self._settle()
                self._connect(*self._roles.values())
            seconds = time.perf_counter() - began
            _LOG.info("made the communicators of %d ranks over %s in %.2f s", world.ranks, world.backend, seconds)

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that waits for other ranks, over whatever communicator.

        Raises:
            RankFailure: inside of a call, where another rank failed meanwhile.
        """
        return function() if self._watch is None else self._watch.call(function, self._waiter)

    def _of_all(self, name: str) -> dist.ProcessGroup:
        group = self._new(name, tuple(range(self.world.ranks)))
        assert group is not None
        return group

    def _new(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A communicator of these ranks; None where this rank is not among them."""
        # Never use_local_synchronization: the names it makes differ between ranks when groups are irregular.
        # Unbound: a group that inherits a device has one communicator for all of its pairs of ranks, so messages to
        # different peers wait for each other, and programs deadlock that end with a communicator per pair.
        with unbound():
            group = self.call(
                lambda: dist.new_group(
                    list(ranks), timeout=self._timeout, backend=self.world.backend, group_desc=f"hydragraph-{name}"
                )
            )
        return group if isinstance(group, dist.ProcessGroup) else None

    def _settle(self) -> None:
        """Waits for all ranks: one that left early would break those that are still connecting."""
        self.gather_objects(None)

    def open_moving(self) -> None:
        """Makes the communicator of state that moves, if it is missing; all ranks call it."""
        if self.world.ranks == 1 or Role.MOVE in self._roles:
            return
        with nullcontext() if self._watch is None else self._watch.guarding():
            self._roles[Role.MOVE] = self._of_all(Role.MOVE.value)
            self._settle()
            self._connect(self._roles[Role.MOVE])

    def _connect(self, *groups: dist.ProcessGroup) -> None:
        """Connect NCCL's communicators of these groups, on all members of each in the same order.

        NCCL makes a communicator in its first operation, which blocks the host until all members take part. Amid a step
        that would hold up what other ranks wait for, so it happens here; and on a thread that the watch can leave.
        """
        if self.world.backend == "nccl":
            for group in groups:
                self.call(partial(_first_all_reduce, group, self.world.device))

    def connect(self, program: RankProgram) -> None:
        """Connect this rank with those that its program sends to or receives from; all ranks call it with theirs.

        Both ends of a pair find it in their programs, and all ranks go through pairs in one order, so that no two wait
        for each other.
        """
        if self.world.backend != "nccl":
            return  # gloo has connected all ranks when it made the groups
        rank = self.world.rank
        for pair in sorted(pairs(program) - self._pairs, key=connecting_order):
            source, destination = pair
            operation, peer = (dist.send, destination) if rank == source else (dist.recv, source)
            group = self._direction(source, destination)
            self.call(partial(_first_message, operation, peer, group, self.world.device))
            self._pairs.add(pair)

    @property
    def _object_group(self) -> dist.ProcessGroup | None:
        """The group for objects, which are CPU tensors: under NCCL the one that `join` found or made."""
        return self._roles[Role.COMMIT] if self.world.backend == "gloo" else self.world.objects

    def wait(self, message: Message | None) -> None:
        """Waits for what an operation returned, on gloo until it is done, on NCCL on the current stream only."""
        if message is None:
            return
        began = time.perf_counter()
        # NCCL's wait only queues on the current stream, and returns at once. gloo's would hold this thread until the
        # message is there, and a broken connection may never end it: a thread of the watch waits instead.
        if self._watch is None or self.world.backend == "nccl":
            with self._guard():
                message.work.wait()
        else:
            self._watch.wait(message.work, self._waiter)
        if message.landed is not None:
            message.landed()
        self.waited_s += time.perf_counter() - began

    def _move(self, out: Tensor, inp: Tensor, start: Callable[[Tensor, Tensor], dist.Work]) -> Message:
        """Starts an operation between two tensors, or between their copies in host memory."""
        staging = self._staging
        if staging is None:
            return Message(start(out, inp))
        arriving = staging.incoming(out)
        leaving = staging.outgoing(inp)
        return Message(start(arriving, leaving), lambda: staging.arrived(arriving, out), (arriving, leaving))

    # Collectives of all ranks.

    def all_to_all(
        self, role: Role, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Message | None:
        """Starts sending consecutive parts of `inp` to the ranks and receiving theirs into `out`.

        Args:
            role: whose communicator; its operations run in the order they are started in.
            out, inp: contiguous, split along dim 0; keep both alive until the work is done.
            out_splits, in_splits: elements of dim 0 from and to each rank.

        Returns:
            What to wait for; None where it is already done.
        """
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        group = self._roles[role]
        # NCCL would send to all peers in one grouped operation, and hold channel buffers for each of them.
        if self.world.backend == "nccl" and self.world.ranks > _GROUPED:
            return Message(
                in_rounds(out, inp, out_splits, in_splits, self.world.rank, group, _GROUPED), kept=(inp, out)
            )
        splits = list(out_splits), list(in_splits)
        return self._move(out, inp, lambda to, of: dist.all_to_all_single(to, of, *splits, group, async_op=True))

    def all_gather(self, role: Role, out: Tensor, inp: Tensor) -> Message | None:
        """Starts gathering equal `inp` of all ranks into `out`, by rank along dim 0; returns what to wait for."""
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        return self._move(out, inp, lambda to, of: all_gather(to, of, self._roles[role]))

    def reduce_scatter(self, role: Role, out: Tensor, inp: Tensor) -> Message | None:
        """Starts summing `inp` over all ranks into equal parts `out`, by rank along dim 0; returns what to wait for."""
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        return self._move(out, inp, lambda to, of: reduce_scatter(to, of, self._roles[role]))

    def all_reduce(self, role: Role, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduces a tensor over all ranks in place, to the same bits everywhere."""
        if self.world.ranks > 1:
            staging = self._staging
            # In place, on the copy in host memory where there is one: it is what comes back, too.
            host = tensor if staging is None else staging.outgoing(tensor)
            with self._guard():
                work = dist.all_reduce(host, operation, group=self._roles[role], async_op=True)
            assert work is not None
            self.wait(Message(work, None if staging is None else lambda: staging.arrived(host, tensor)))

    def reduce_to_host(
        self, role: Role, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Reduce a tensor over all ranks and return the result in host memory, the same bits on every rank.

        An aborted NCCL communicator raises no error: its kernels return, and the result is whatever memory holds. So
        the failure watch is asked after the host has waited, and every rank marks its own place with the number of this
        reduction, which no earlier content of that memory has.

        Raises:
            RankFailure: another rank failed meanwhile.
            RuntimeError: the reduction ended before every rank took part; within a call that the watch knows of, it
                becomes the RankFailure that explains it.
        """
        ranks = self.world.ranks
        if ranks == 1:
            return tensor.to("cpu", copy=True)
        self._reductions += 1
        marks = tensor.new_zeros(ranks)
        marks[self.world.rank] = self._reductions
        reduced = torch.cat([tensor.flatten(), marks])
        self.all_reduce(role, reduced, operation)
        with nullcontext() if self._watch is None else self._watch.waiting():
            on_host = reduced.to("cpu", copy=True)  # waits until the current stream has them
        if self._watch is not None:
            self._watch.check()
        if not bool((on_host[-ranks:] == self._reductions).all()):
            with self._guard():
                raise RuntimeError("a reduction ended before every rank took part: its communicator was aborted")
        return on_host[:-ranks].view(tensor.shape)

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank; for small picklable objects."""
        values = [value] * self.world.ranks
        if self.world.ranks > 1:
            self.call(lambda: dist.all_gather_object(values, value, self._object_group))
        return values

    def tell(self, value: T) -> T:
        """Rank 0's value, on every rank; for small picklable objects. Rank 0 does not wait until the others have it."""
        if self.world.ranks == 1:
            return value
        for message in self._told:  # of the last time: ranks have met since
            self.wait(message)
        self._told = ()
        leads = self.world.rank == 0
        data = pickle.dumps(value) if leads else b""
        first = torch.zeros(_TOLD, dtype=torch.uint8)
        if leads:
            beginning = len(data).to_bytes(_LENGTH, "little") + data[: _TOLD - _LENGTH]
            first[: len(beginning)] = torch.frombuffer(bytearray(beginning), dtype=torch.uint8)
        messages = [self._from_first(first)]
        if not leads:
            self.wait(messages[0])
            data = first.numpy().tobytes()
        length = len(data) if leads else int.from_bytes(data[:_LENGTH], "little")
        if length > _TOLD - _LENGTH:
            rest = torch.zeros(length - (_TOLD - _LENGTH), dtype=torch.uint8)
            if leads:
                rest[:] = torch.frombuffer(bytearray(data[_TOLD - _LENGTH :]), dtype=torch.uint8)
            messages.append(self._from_first(rest))
            if not leads:
                self.wait(messages[1])
                data += rest.numpy().tobytes()
        if leads:
            self._told = tuple(messages)
            return value
        told: T = pickle.loads(data[_LENGTH : _LENGTH + length])
        return told

    def _from_first(self, tensor: Tensor) -> Message:
        """Starts bringing rank 0's bytes to all."""
        with self._guard():
            work = dist.broadcast(tensor, 0, group=self._object_group, async_op=True)
        assert work is not None
        return Message(work, kept=(tensor,))

    def same_everywhere(self, what: str, text: str) -> None:
        """Checks that a short text, such as a hash, is the same on all ranks.

        Raises:
            ValueError: on every rank, naming the ranks that have each text.
        """
        texts = self.gather_objects(text)
        if len(set(texts)) > 1:
            differing = "; ".join(
                f"{value!r} on ranks {[rank for rank, other in enumerate(texts) if other == value]}"
                for value in dict.fromkeys(texts)
            )
            raise ValueError(f"{what} differs between ranks: {differing}; give every rank the same {what}")

    # Point to point.

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts sending a contiguous tensor to a rank; keep it unchanged until the message is done.

        Tags pair sends with receives on gloo; NCCL knows no tags and pairs them in order, per pair and direction.
        """
        leaving = tensor if self._staging is None else self._staging.outgoing(tensor)
        work = dist.isend(leaving, peer, self._direction(self.world.rank, peer), tag)
        assert work is not None
        return Message(work, kept=(leaving,))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts receiving into a contiguous tensor from a rank."""
        staging = self._staging
        arriving = tensor if staging is None else staging.incoming(tensor)
        work = dist.irecv(arriving, peer, self._direction(peer, self.world.rank), tag)
        assert work is not None
        return Message(work, None if staging is None else lambda: staging.arrived(arriving, tensor), (arriving,))

    def _direction(self, source: int, destination: int) -> dist.ProcessGroup:
        if source == destination or not max(source, destination) < self.world.ranks:
            raise ValueError(f"rank {source} cannot send to rank {destination} of {self.world.ranks}: name two ranks")
        return self._directions[_Direction.UP if destination > source else _Direction.DOWN]

    # Tensor parallelism.

    def tensor_parallel(self, rank_sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], AnyCollectives]:
        """Makes the communicators of stages that are missing; all ranks call it with the same list.

        Args:
            rank_sets: of every stage of every pipeline that is about to run, each in tensor-parallel order.

        Returns:
            The collectives of those sets that this rank is in; valid until the next call.
        """
        # Sorted, as the order of parts is the collectives' matter: stages of the same ranks in any order share one. In
        # the order of the list, which is the same on all ranks: they make each group together.
        needed = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in rank_sets if len(ranks) > 1))
        missing = [ranks for ranks in needed if ranks not in self._tensor_parallel]
        if missing:
            with nullcontext() if self._watch is None else self._watch.guarding():
                for ranks in missing:
                    self._tensor_parallel[ranks] = self._new("tp-" + "-".join(map(str, ranks)), ranks)
                self._settle()
                self._connect(*(group for ranks in missing if (group := self._tensor_parallel[ranks]) is not None))
            _LOG.info("made tensor-parallel communicators of ranks %s", " and ".join(map(str, missing)))
        for ranks in needed:
            self._tensor_parallel.move_to_end(ranks)
        # Never one that is about to be used, even where a strategy has more stages than the capacity.
        self._evict(max(self._capacity, len(needed)))
        return {ranks: self._collectives(ranks) for ranks in rank_sets if self.world.rank in ranks}

    @property
    def tensor_parallel_count(self) -> int:
        """How many tensor-parallel communicators are kept, over all ranks."""
        return len(self._tensor_parallel)

    def _collectives(self, ranks: tuple[int, ...]) -> AnyCollectives:
        group = self._tensor_parallel[tuple(sorted(ranks))] if len(ranks) > 1 else None
        native = self.world.backend == "nccl"
        collectives = Collectives(ranks, self.world.rank, group, self._guard, self.wait, native)
        return collectives if group is None or self._staging is None else StagedCollectives(collectives, self._staging)

    def _evict(self, capacity: int) -> None:
        while len(self._tensor_parallel) > capacity:
            ranks, group = self._tensor_parallel.popitem(last=False)
            _LOG.info("dropped the communicator of ranks %s, used longest ago: %d are kept", ranks, capacity)
            if group is not None:
                dist.destroy_process_group(group)

    # The end.

    def abort(self) -> None:
        """Ends pending operations of NCCL communicators from any thread; gloo's end when their sockets are cut."""
        if self.world.backend == "nccl":
            abort_together(self._all())

    def close(self) -> None:
        """Drops all communicators."""
        groups = self._all()
        self._roles = {}
        self._directions = {}
        self._tensor_parallel.clear()
        if self._waiter is not None:
            self._waiter.close()
        for group in groups:
            # Ranks that meet anew have dropped all groups with the default one.
            with contextlib.suppress(ValueError):
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        if self._watch is not None and self._watch.broken:
            drop(groups)  # gloo's destructor waits for operations, and some of them may never end

    def _all(self) -> list[dist.ProcessGroup]:
        # Copies, each made at once: the watch asks from its own thread while this rank may be making groups.
        made = [*self._roles.copy().values(), *self._directions.copy().values()]
        return made + [group for group in self._tensor_parallel.copy().values() if group is not None]


def _first_all_reduce(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a group's first operation and wait for its result."""
    arrived = torch.ones(1, device=device)
    dist.all_reduce(arrived, group=group)
    arrived.item()


def _first_message(operation: Callable[..., object], peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Run the first operation between this rank and a peer and wait for its end."""
    arrived = torch.ones(1, device=device)
    operation(arrived, peer, group)
    arrived.item()


def in_rounds(
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
    grouped: int,
) -> Works:
    """Start an all-to-all as grouped sends and receives: `grouped` peers at a time, nothing for empty messages.

    A round is a range of distances: every rank sends so far ahead and receives from so far behind, so that the two ends
    of a message are in the same round. What a rank has for itself is copied at once.
    """
    # Example: 5 ranks, grouped = 2. In its first round rank 0 sends to 1 and 2 and receives from 4 and 3; in its second
    # it sends to 3 and 4 and receives from 2 and 1. The message 0 -> 3 has distance 3 at both of its ends: rank 3, too,
    # receives it, from rank (3 - 3) % 5, in its second round.
    leaving = inp.split(list(in_splits))
    arriving = out.split(list(out_splits))
    arriving[rank].copy_(leaving[rank])
    works: list[Operation] = []
    ranks = len(leaving)
    for first in range(1, ranks, grouped):
        operations = []
        for distance in range(first, min(first + grouped, ranks)):
            ahead = (rank + distance) % ranks
            behind = (rank - distance) % ranks
            if len(leaving[ahead]):
                operations.append(dist.P2POp(dist.isend, leaving[ahead], ahead, group))
            if len(arriving[behind]):
                operations.append(dist.P2POp(dist.irecv, arriving[behind], behind, group))
        works += dist.batch_isend_irecv(operations) if operations else []
    return Works(tuple(works))

"""The communicators of one executable: one for each kind of traffic, and one for each tensor-parallel group.

Traffic is kept apart because a connection is a queue: behind 64 MB of weights, a 4-byte message to the same peer waits
17-45 ms in one gloo group and 0.2-2.7 ms in two.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hydragraph.runtime.fault import Watch
from hydragraph.runtime.launch import World

T = TypeVar("T")
Guard = Callable[[], AbstractContextManager[None]]
Wait = Callable[[dist.Work], None]

# Native gloo all-reduces take 0.7-2 ms at 16 B, exchange and local addition 0.1 ms; they meet at these sizes.
_EXCHANGE_BYTES_PAIR = 256 * 1024  # 2 ranks
_EXCHANGE_BYTES = 64 * 1024  # more ranks


class Role(Enum):
    """A kind of traffic between all ranks."""

    PULL = "pull"  # weights from their owners
    PUSH = "push"  # gradients to their owners
    COMMIT = "commit"  # agreement before the update, and on programs before they run


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
        watch: what tells an error of communication from one of ours, and ends waits; make it first, and then these
            groups while it is `guarding`. None: waits end with the timeout.
        capacity: how many tensor-parallel communicators to keep for later strategies.
    """

    def __init__(self, world: World, timeout: timedelta, *, watch: Watch | None = None, capacity: int = 64) -> None:
        self.world, self._timeout, self._watch, self._capacity = world, timeout, watch, capacity
        self._guard: Guard = nullcontext if watch is None else watch.communicating
        self._roles: dict[Role, dist.ProcessGroup] = {}
        self._directions: dict[_Direction, dist.ProcessGroup] = {}
        # By sorted ranks, least recently used first; None where this rank is no member. The same keys in the same
        # order on all ranks, so that they make and drop groups together.
        self._tensor_parallel: OrderedDict[tuple[int, ...], dist.ProcessGroup | None] = OrderedDict()
        if world.ranks > 1:
            with self._guard():
                self._roles = {role: self._of_all(role.value) for role in Role}
                self._directions = {direction: self._of_all(direction.value) for direction in _Direction}
                self._settle()

    def _of_all(self, name: str) -> dist.ProcessGroup:
        group = self._new(name, tuple(range(self.world.ranks)))
        assert group is not None
        return group

    def _new(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A communicator of these ranks; None where this rank is not among them."""
        # Never use_local_synchronization: the names it makes differ between ranks when groups are irregular.
        group = dist.new_group(
            list(ranks), timeout=self._timeout, backend=self.world.backend, group_desc=f"hydragraph-{name}"
        )
        return group if isinstance(group, dist.ProcessGroup) else None

    def _settle(self) -> None:
        """Waits for all ranks: one that left early would break those that are still connecting."""
        dist.all_gather_object([None] * self.world.ranks, None, self._object_group)

    @property
    def _object_group(self) -> dist.ProcessGroup | None:
        """Where objects travel: they are CPU tensors, so under NCCL the default group, which has gloo beside it."""
        return self._roles[Role.COMMIT] if self.world.backend == "gloo" else None

    def wait(self, work: dist.Work | None) -> None:
        """Waits for what an operation returned, on gloo until it is done, on NCCL on the current stream only."""
        if work is None:
            return
        if self._watch is None or self.world.backend == "nccl":
            with self._guard():
                work.wait()
        else:
            self._watch.wait(work)

    # Collectives of all ranks.

    def all_to_all(
        self, role: Role, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> dist.Work | None:
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
        work: dist.Work = dist.all_to_all_single(out, inp, list(out_splits), list(in_splits), group, async_op=True)
        return work

    def all_gather(self, role: Role, out: Tensor, inp: Tensor) -> dist.Work | None:
        """Starts gathering equal `inp` of all ranks into `out`, by rank along dim 0; returns what to wait for."""
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        return _all_gather(out, inp, self._roles[role])

    def reduce_scatter(self, role: Role, out: Tensor, inp: Tensor) -> dist.Work | None:
        """Starts summing `inp` over all ranks into equal parts `out`, by rank along dim 0; returns what to wait for."""
        if self.world.ranks == 1:
            out.copy_(inp)
            return None
        return _reduce_scatter(out, inp, self._roles[role])

    def all_reduce(self, role: Role, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduces a tensor over all ranks in place, to the same bits everywhere."""
        if self.world.ranks > 1:
            with self._guard():
                work = dist.all_reduce(tensor, operation, group=self._roles[role], async_op=True)
            self.wait(work)

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank; for small picklable objects."""
        values = [value] * self.world.ranks
        if self.world.ranks > 1:
            with self._guard():
                dist.all_gather_object(values, value, self._object_group)
        return values

    def same_everywhere(self, what: str, text: str) -> None:
        """Checks that a short text, such as a hash, is the same on all ranks.

        Raises:
            ValueError: on every rank, naming the ranks that have each text.
        """
        texts = self.gather_objects(text)
        if len(set(texts)) > 1:
            found = "; ".join(
                f"{each!r} on ranks {[rank for rank, other in enumerate(texts) if other == each]}"
                for each in dict.fromkeys(texts)
            )
            raise ValueError(f"{what} differs between ranks: {found}; give every rank the same {what}")

    # Point to point.

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts sending a contiguous tensor to a rank; keep it unchanged until the work is done.

        Tags pair sends with receives on gloo; NCCL knows no tags and pairs them in order, per pair and direction.
        """
        work = dist.isend(tensor, peer, self._direction(self.world.rank, peer), tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts receiving into a contiguous tensor from a rank."""
        work = dist.irecv(tensor, peer, self._direction(peer, self.world.rank), tag)
        assert work is not None
        return work

    def _direction(self, source: int, destination: int) -> dist.ProcessGroup:
        if source == destination or not max(source, destination) < self.world.ranks:
            raise ValueError(f"rank {source} cannot send to rank {destination} of {self.world.ranks}: name two ranks")
        return self._directions[_Direction.UP if destination > source else _Direction.DOWN]

    # Tensor parallelism.

    def tensor_parallel(self, rank_sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Collectives]:
        """Makes the communicators of stages that are missing; all ranks call it with the same list.

        Args:
            rank_sets: of every stage of every pipeline that is about to run, each in tensor-parallel order.

        Returns:
            The collectives of those sets that this rank is in; valid until the next call.
        """
        wanted = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in rank_sets if len(ranks) > 1))
        missing = [ranks for ranks in wanted if ranks not in self._tensor_parallel]
        if missing:
            with self._guard(), nullcontext() if self._watch is None else self._watch.guarding():
                for ranks in missing:
                    self._tensor_parallel[ranks] = self._new("tp-" + "-".join(map(str, ranks)), ranks)
                self._settle()
        for ranks in wanted:
            self._tensor_parallel.move_to_end(ranks)
        self._evict(max(self._capacity, len(wanted)))
        return {ranks: self._collectives(ranks) for ranks in rank_sets if self.world.rank in ranks}

    @property
    def tensor_parallel_count(self) -> int:
        """How many tensor-parallel communicators are kept, over all ranks."""
        return len(self._tensor_parallel)

    def _collectives(self, ranks: tuple[int, ...]) -> Collectives:
        group = self._tensor_parallel[tuple(sorted(ranks))] if len(ranks) > 1 else None
        return Collectives(ranks, self.world.rank, group, self._guard, self.wait)

    def _evict(self, capacity: int) -> None:
        while len(self._tensor_parallel) > capacity:
            _, group = self._tensor_parallel.popitem(last=False)
            if group is not None:
                dist.destroy_process_group(group)

    # The end.

    def abort(self) -> None:
        """Ends pending operations of NCCL communicators from any thread; gloo's end when their sockets are cut."""
        if self.world.backend == "nccl":
            for group in self._all():
                group.abort()

    def close(self) -> None:
        """Drops all communicators."""
        groups = list(self._all())
        self._roles, self._directions = {}, {}
        self._tensor_parallel.clear()
        for group in groups:
            if self._watch is not None and self._watch.broken:
                # gloo's destructor waits for operations, and some of them may never end: it must not run.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _all(self) -> Iterator[dist.ProcessGroup]:
        yield from self._roles.values()
        yield from self._directions.values()
        yield from (group for group in self._tensor_parallel.values() if group is not None)


def _wait(work: dist.Work) -> None:
    work.wait()


@dataclass(frozen=True)
class Collectives:
    """What compiled graphs call for tensor parallelism within one stage.

    All ranks of the stage call the same methods in the same order, with tensors of equal shape. Each returns a new
    tensor, reductions the same bits on every rank.

    Attributes:
        ranks: the stage's, in tensor-parallel order, which is the order of parts.
        rank: this one.
        group: their communicator; None for a single rank.
        guard: entered around the start of every communication.
        wait: waits for one.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    guard: Guard = nullcontext
    wait: Wait = _wait

    @property
    def size(self) -> int:
        """The tensor-parallel degree."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's place in the stage."""
        return self.ranks.index(self.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage; half precision is added in fp32 where that costs nothing (exchanges)."""
        if self._exchanges(x):
            return _sum(self._exchange([x] * self.size))
        return self._native_all_reduce(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the stage."""
        if self._exchanges(x):
            return torch.stack(self._exchange([x] * self.size)).amax(0)
        return self._native_all_reduce(x, dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The concatenation along `dim` of the stage's parts, in the stage's order."""
        if self.size == 1:
            return x.clone()
        if self._exchanges(x):
            return torch.cat(self._exchange([x] * self.size), dim)
        assert self.group is not None
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        with torch.no_grad(), self.guard():
            work = _all_gather(out.view(-1), x.view(-1), self.group)
        self.wait(work)
        places = sorted(self.ranks)  # the group's own order
        return torch.cat([out[places.index(rank)] for rank in self.ranks], dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum over the stage.

        Raises:
            ValueError: `dim` does not divide into equal parts.
        """
        if x.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide by {self.size} ranks: pad it")
        if self.size == 1:
            return x.clone()
        parts = list(x.chunk(self.size, dim))
        if not self._native:
            # At every size: gloo's own moves no less, and this adds in a fixed order.
            return _sum(self._exchange(parts))
        assert self.group is not None
        by_group = torch.stack([parts[self.ranks.index(rank)] for rank in sorted(self.ranks)])
        out = torch.empty_like(by_group[0])
        with torch.no_grad(), self.guard():
            work = _reduce_scatter(out.view(-1), by_group.view(-1), self.group)
        self.wait(work)
        return out

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of what every rank has whole, contiguous; nothing is sent.

        Raises:
            ValueError: `dim` does not divide into equal parts.
        """
        if x.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide by {self.size} ranks: pad it")
        return x.chunk(self.size, dim)[self.index].clone(memory_format=torch.contiguous_format)

    @property
    def _native(self) -> bool:
        return self.group is not None and dist.get_backend(self.group) == "nccl"

    def _exchanges(self, x: Tensor) -> bool:
        limit = _EXCHANGE_BYTES_PAIR if self.size == 2 else _EXCHANGE_BYTES
        return self.size == 1 or (not self._native and x.numel() * x.element_size() <= limit)

    def _native_all_reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        with torch.no_grad(), self.guard():
            work = dist.all_reduce(out, operation, group=self.group, async_op=True)
        assert work is not None
        self.wait(work)
        return out

    def _exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sends `parts[i]` to the stage's rank i; returns what came from each, in the stage's order."""
        mine = parts[self.index].contiguous()
        received = [mine if rank == self.rank else torch.empty_like(mine) for rank in self.ranks]
        sent = [part.contiguous() for part in parts]  # named, because they must live until the sends are done
        works: list[dist.Work | None] = []
        with torch.no_grad(), self.guard():
            for place, rank in enumerate(self.ranks):
                if rank != self.rank:
                    works.append(dist.irecv(received[place], rank, self.group))
                    works.append(dist.isend(sent[place], rank, self.group))
        for work in works:
            assert work is not None
            self.wait(work)
        return received


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, as a new tensor."""
    first = parts[0]
    total = first.to(torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def _all_gather(out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # PyTorch 2.13 renames these two and deprecates the old names; 2.11 has only the old ones.
    function = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work: dist.Work = function(out, inp, group=group, async_op=True)
    return work


def _reduce_scatter(out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> dist.Work:
    function = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work: dist.Work = function(out, inp, group=group, async_op=True)
    return work

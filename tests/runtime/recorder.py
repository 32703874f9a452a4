"""A device that only records what each queue reads and writes, and what may run at the same time.

Every queue has a vector clock; marks carry clocks from one to another. Two accesses to the same memory, one of them a
write, must be ordered by these clocks, and memory that is dropped must not be in use by a queue that the allocator
does not know of. If both hold, a GPU cannot read too early or overwrite too soon, in whatever order it runs the queues.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydragraph.cluster.collectives import StartsAtOnce, head_loss, head_token_losses
from hydragraph.cluster.communicators import Channel
from hydragraph.cluster.launch import World
from hydragraph.ir.instruction import Stream
from hydragraph.kernels import slice_copy
from hydragraph.runtime.streams import DeviceStreams

Times = dict[str, int]  # queue -> how far it is known to be


class RaceError(AssertionError):
    """Two queues use the same memory in no order."""


@dataclass
class Memory:
    """Accesses to a piece of memory.

    Attributes:
        home: the queue it was allocated for, which gets it again when it is dropped.
        written: the last write.
        read: queue -> its last read since.
        used: queue -> its last use of any kind.
        held: queues that the allocator waits for.
    """

    alive: StorageWeakRef
    home: str
    written: tuple[str, int, str] | None = None
    read: dict[str, tuple[int, str]] = field(default_factory=dict)
    used: Times = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Sees every operator and every message while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.accesses = Stream.COMPUTE.value, 0
        self._clocks: dict[str, Times] = {}
        self._host: Times = {}
        self._memory: dict[int, Memory] = {}
        # A device's slice_copy is one of its operators; on the CPU only the reference's are seen here.
        self._as_operators = mock.patch.object(slice_copy, "move", slice_copy.reference)

    def __enter__(self) -> Any:
        self._as_operators.start()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._as_operators.stop()

    # Queues.

    @contextmanager
    def on(self, queue: str) -> Iterator[None]:
        """Make a queue current."""
        before, self.current = self.current, queue
        yield
        self.current = before

    def snapshot(self) -> Times:
        """Return what is known to have happened when the current queue gets here."""
        return dict(self._clocks.get(self.current, {}))

    def learn(self, times: Times) -> None:
        """Let the current queue come after these."""
        clock = self._clocks.setdefault(self.current, {})
        for queue, at in times.items():
            clock[queue] = max(clock.get(queue, 0), at)

    def host_learns(self, times: Times) -> None:
        """Let everything that is queued from now on come after these, because the host saw them happen."""
        for queue, at in times.items():
            self._host[queue] = max(self._host.get(queue, 0), at)

    def everything(self) -> Times:
        """Return where all queues are."""
        return {queue: clock.get(queue, 0) for queue, clock in self._clocks.items()}

    # Memory.

    def operate(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note an operation on the current queue."""
        self._sweep()
        self.learn(self._host)
        clock = self._clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        for tensor in reads:
            self._access(name, tensor, write=False)
        for tensor in writes:
            self._access(name, tensor, write=True)

    def hold(self, tensor: Tensor) -> None:
        """Note that the allocator waits for the current queue before it reuses this memory."""
        self._of(tensor).held.add(self.current)

    def _of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None or known.alive.expired():
            known = self._memory[storage._cdata] = Memory(StorageWeakRef(storage), self.current)
        return known

    def _access(self, name: str, tensor: Tensor, write: bool) -> None:
        if tensor.numel() == 0:
            return
        memory, clock, at = self._of(tensor), self._clocks[self.current], self._clocks[self.current][self.current]
        self.accesses += 1
        others = [] if memory.written is None else [memory.written]
        if write:
            others += [(queue, when, what) for queue, (when, what) in memory.read.items()]
        for queue, when, what in others:
            if clock.get(queue, 0) < when:
                raise RaceError(f"{self.current}: {name} does not wait for {queue}: {what}")
        memory.used[self.current] = at
        if write:
            memory.written, memory.read = (self.current, at, name), {}
        else:
            memory.read[self.current] = (at, name)

    def _sweep(self) -> None:
        """See what was dropped since, and whether its memory may be handed out again."""
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            memory = self._memory.pop(key)
            seen = [self._host, *(self._clocks.get(queue, {}) for queue in {memory.home, *memory.held})]
            for queue, at in memory.used.items():
                if all(clock.get(queue, 0) < at for clock in seen):
                    raise RaceError(f"{memory.home}: memory is dropped that {queue} may still use")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operator: what its schema says it writes, what it returns anew, and what else it gets."""
        given = kwargs or {}
        out = func(*args, **given)
        arguments = func._schema.arguments
        named = [*zip(arguments, args, strict=False), *((a, given[a.name]) for a in arguments if a.name in given)]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument, value in named:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            (writes if argument.alias_info is not None and argument.alias_info.is_write else reads).extend(tensors)
        inputs = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [t for t in results if t.untyped_storage()._cdata not in inputs]
        if results and not fresh and not writes:  # a view
            return out
        name = str(func)
        if name.startswith(("aten.empty", "aten.new_empty")):
            for tensor in fresh:
                self._of(tensor)
            return out
        self.operate(name, reads, [*writes, *fresh])
        if "_local_scalar_dense" in name:
            self.host_learns(self.snapshot())
        return out


class RecordingStreams(DeviceStreams):
    """Queues of a device that waits in its queues; marks pass at random times."""

    queued = True

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self.recorder, self._random = recorder, random.Random(seed)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return self.recorder.on(stream.value)

    def beside(self) -> AbstractContextManager[None]:
        return self.recorder.on("beside")

    def mark(self) -> Times:
        return self.recorder.snapshot()

    def wait(self, mark: Times) -> None:
        self.recorder.learn(mark)

    def passed(self, mark: Times) -> bool:
        seen = self._random.random() < 0.3
        if seen:
            self.recorder.host_learns(mark)
        return seen

    def reach(self, mark: Times) -> None:
        self.recorder.host_learns(mark)

    def hold(self, tensor: Tensor) -> None:
        self.recorder.hold(tensor)

    def finish(self) -> None:
        self.recorder.host_learns(self.recorder.everything())


@dataclass(frozen=True)
class RecordedMessage:
    """A message of nobody: where its queue is when it is through."""

    end: Times
    done: bool = False


class RecordingGroups:
    """One rank's communicators, each a queue of the device as NCCL's are; what arrives is zeros."""

    waited_s = 0.0

    def __init__(self, recorder: Recorder, rank: int, ranks: int) -> None:
        self._recorder = recorder
        self.world = World(rank, ranks, rank, torch.device("cpu"), "nccl")

    def _message(self, queue: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> RecordedMessage:
        begun = self._recorder.snapshot()
        with self._recorder.on(queue):
            self._recorder.learn(begun)
            self._recorder.operate(f"message {queue}", reads, writes)
            end = self._recorder.snapshot()
        with torch.utils._python_dispatch._disable_current_modes():
            for tensor in writes:
                tensor.zero_()
        return RecordedMessage(end)

    def wait(self, message: RecordedMessage | None) -> None:
        if message is not None:
            self._recorder.learn(message.end)

    def all_to_all(self, role: Channel, out: Tensor, inp: Tensor, out_splits: Any, in_splits: Any) -> RecordedMessage:
        assert len(out) == sum(out_splits)
        assert len(inp) == sum(in_splits)
        return self._message(role.value, [inp], [out])

    def all_gather(self, role: Channel, out: Tensor, inp: Tensor) -> RecordedMessage:
        return self._message(role.value, [inp], [out])

    def reduce_scatter(self, role: Channel, out: Tensor, inp: Tensor) -> RecordedMessage:
        return self._message(role.value, [inp], [out])

    def all_reduce(self, role: Channel, tensor: Tensor, operation: object = None) -> None:
        self.wait(self._message(role.value, [tensor], [tensor]))

    def reduce_to_host(self, role: Channel, tensor: Tensor, operation: object = None) -> Tensor:
        self.all_reduce(role, tensor)
        return tensor.to("cpu", copy=True)

    def send(self, tensor: Tensor, peer: int, tag: int) -> RecordedMessage:
        return self._message(f"to {peer}", [tensor], [])

    def receive(self, tensor: Tensor, peer: int, tag: int) -> RecordedMessage:
        return self._message(f"from {peer}", [], [tensor])

    def connect(self, program: object) -> None:
        """Do nothing: there are no other ranks to connect with."""

    def tensor_parallel(self, rank_sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], RecordingCollectives]:
        mine = [ranks for ranks in rank_sets if self.world.rank in ranks]
        return {ranks: RecordingCollectives(ranks, ranks.index(self.world.rank)) for ranks in mine}


class RecordingCollectives(StartsAtOnce):
    """Tensor-parallel collectives of one rank that hears only itself; operators of the current queue."""

    def __init__(self, ranks: tuple[int, ...], index: int) -> None:
        self.ranks, self.index, self.size = ranks, index, len(ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    all_reduce_max = all_reduce

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.index].clone(memory_format=torch.contiguous_format)

    reduce_scatter, head_loss, head_token_losses = split, head_loss, head_token_losses


class Unwatched:
    """A failure watch whose methods have no effect."""

    def at(self, index: int) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    communicating: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    waiting: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

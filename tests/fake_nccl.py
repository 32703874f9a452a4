"""NCCL on CPUs, with real data: communicators that queue, over gloo, and streams that wait without the host.

Inside `fake_nccl()`, a rank trains as it would on a GPU of its own:

- a communicator runs its operations in order, on its own thread, each after the stream that started it;
- its output is NaN until it has finished and the reader's stream has waited for it; `wait()` does not block the host;
- the first operation of a communicator blocks the host until all members have arrived; each pair of ranks has one;
- `abort()` ends pending operations without an error and leaves garbage;
- an operation that fails before an abort never ends, and a watchdog ends the process, unless
  TORCH_NCCL_ASYNC_ERROR_HANDLING says otherwise.

The compute stream runs with the host: where a GPU's stream would wait, the host waits before the next operator. Other
streams' operators are deferred while their stream waits, because the host runs ahead of them on a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hydragraph.cluster import launch
from hydragraph.cluster.processes.cuda_environment import set_cuda_environment
from hydragraph.ir.instruction import Stream
from hydragraph.kernels import slice_copy
from hydragraph.runtime import executor
from hydragraph.runtime.streams import DeviceStreams

GARBAGE = 7.0e7
_CONNECT_TAG = 1 << 20
_COMPUTE = Stream.COMPUTE.value

Entry = Callable[[], object]
_ProcessGroup: Any = dist.ProcessGroup  # its stubs do not have all names that PyTorch calls


class Queue:
    """A stream: its entries in order; any thread may run the next one."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.done = 0
        self._changed = threading.Condition()
        self._busy = False

    def add(self, entry: Entry) -> None:
        """Run an entry now if it is the first, else later."""
        self.entries.append(entry)
        if self.done == len(self.entries) - 1:
            self.run(len(self.entries))

    def run(self, until: int) -> None:
        """Run the entries before `until`, or wait until other threads have."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.done >= until or not self._busy)
                if self.done >= until:
                    return
                self._busy = True
            try:
                with _disable_current_modes(), torch.no_grad():
                    self.entries[self.done]()
            finally:
                with self._changed:
                    self.entries[self.done] = _nothing  # its tensors are no longer needed
                    self.done += 1
                    self._busy = False
                    self._changed.notify_all()


def _nothing() -> None:
    pass


Mark = tuple[Queue, int]


class Device(TorchDispatchMode):
    """A rank's device: the operators of an iteration run on its current stream.

    Attributes:
        entered: whether operators are seen; outside of iterations the host waits at once.
        first_uses: communicators that this process has connected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queues = {name: Queue() for name in (*(stream.value for stream in Stream), "beside")}
        self.current = _COMPUTE
        self.thread = threading.get_ident()
        self.entered = False
        self.first_uses = 0

    @property
    def queue(self) -> Queue:
        """The current stream; for another thread than the rank's own, one of its own."""
        return self.queues[self.current] if threading.get_ident() == self.thread else Queue()

    def mark(self) -> Mark:
        return self.queue, len(self.queue.entries)

    def let_wait(self, entry: Entry) -> None:
        """Let the current stream wait inside an entry, and the host as well where it runs with the stream."""
        queue = self.queue
        queue.entries.append(entry)
        if not self.entered or threading.get_ident() != self.thread:
            queue.run(len(queue.entries))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        queue = self.queue
        if self.current == _COMPUTE or func is torch.ops.aten._local_scalar_dense.default:
            queue.run(len(queue.entries))
        if queue.done == len(queue.entries):
            return func(*args, **named)
        arguments = func._schema.arguments
        values = [*zip(arguments, args, strict=False), *((a, named[a.name]) for a in arguments if a.name in named)]
        written = [value for a, value in values if a.alias_info is not None and a.alias_info.is_write]
        if written:
            queue.entries.append(lambda: func(*args, **named))
            return written[0] if len(func._schema.returns) == 1 else tuple(written) or None
        out = func(*args, **named)  # of what may not be there yet: for its form
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, named)) if isinstance(t, Tensor)}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in inputs]

        def again() -> None:
            for made, value in zip(fresh, tree_leaves(func(*args, **named)), strict=True):
                made.copy_(value)

        if fresh and "empty" not in str(func):
            queue.entries.append(again)
        return out


class Streams(DeviceStreams):
    """The executor's streams of such a device."""

    queued = True

    def __init__(self, device: Device) -> None:
        self.device = device

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before, self.device.current = self.device.current, name
        try:
            yield
        finally:
            self.device.current = before

    def on(self, stream: Stream) -> Any:
        return self._on(stream.value)

    def beside(self) -> Any:
        return self._on("beside")

    def mark(self) -> Mark:
        return self.device.mark()

    def wait(self, mark: Mark) -> None:
        queue, until = mark
        if queue.done < until:
            self.device.let_wait(partial(queue.run, until))

    def passed(self, mark: Mark) -> bool:
        return mark[0].done >= mark[1]

    def reach(self, mark: Mark) -> None:
        mark[0].run(mark[1])

    def finish(self) -> None:
        for queue in self.device.queues.values():
            queue.run(len(queue.entries))


class FakeWork(dist.Work):
    """An operation of a communicator: `out` receives what arrives when a stream gets to its `wait`."""

    def __init__(self, device: Device, out: Tensor | None) -> None:
        super().__init__()
        self.ended, self.aborted = threading.Event(), False
        self._device, self._out = device, out
        self.arrives = None if out is None else torch.empty_like(out)
        self._landing = threading.Lock()

    def begin(self) -> None:
        """Save a result that was reduced in place; make the output unreadable until the end."""
        if self._out is not None and self.arrives is not None:
            self.arrives.copy_(self._out)
            self._out.fill_(float("nan") if self._out.is_floating_point() else int(GARBAGE))

    def land(self) -> None:
        self.ended.wait()
        with self._landing:
            if self._out is not None and self.arrives is not None:
                self._out.fill_(GARBAGE) if self.aborted else self._out.copy_(self.arrives)
            self._out = self.arrives = None

    def wait(self, timeout: object = None) -> bool:
        self._device.let_wait(self.land)
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Communicator:
    """Runs operations in order on a thread."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Mark, Callable[[], object], FakeWork]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            (stream, until), operate, work = self.queue.get()
            try:
                stream.run(until)
                operate()
            except RuntimeError as error:
                if work.aborted:
                    return
                handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
                if handling not in ("0", "2"):
                    sys.stderr.write(f"watchdog: {error}\n")
                    os.abort()
                return  # this operation and the following ones hang until the abort
            work.ended.set()
            del operate, work


class FakeNccl(_ProcessGroup):
    """A process group of such communicators."""

    device: Device  # of this process
    name = ""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._aborted = False
        self._pending: list[FakeWork] = []

    def getBackendName(self) -> str:  # noqa: N802
        return "fake_nccl"

    @property
    def group_name(self) -> str:
        return self.name

    def abort(self) -> None:
        self._aborted = True
        for work in list(self._pending):
            if not work.ended.is_set():
                work.aborted = True
                work.ended.set()

    def shutdown(self) -> None:
        self.abort()

    def _connected(self, *pair: int) -> Communicator:
        if pair not in self._communicators:
            self.device.first_uses += 1
            with _disable_current_modes():
                if pair:
                    peer = sum(pair) - self.rank()
                    sent = self._gloo.send([torch.zeros(1)], peer, _CONNECT_TAG)
                    self._gloo.recv([torch.zeros(1)], peer, _CONNECT_TAG).wait()
                    sent.wait()
                else:
                    self._gloo.barrier().wait()
            self._communicators[pair] = Communicator()
        return self._communicators[pair]

    def _start(self, pair: tuple[int, ...], out: Tensor | None, operate: Callable[[Tensor], object]) -> FakeWork:
        if self._aborted:
            raise RuntimeError("the communicator was aborted")
        communicator = self._connected(*pair)
        device = self.device
        with _disable_current_modes():
            work = FakeWork(device, out)
            queue = device.queue
            queue.add(work.begin)
            arrives = torch.empty(0) if work.arrives is None else work.arrives
        self._pending = [*(kept for kept in self._pending if not kept.ended.is_set()), work]
        communicator.queue.put(((queue, len(queue.entries)), partial(operate, arrives), work))
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> FakeWork:
        return self._start((), tensors[0], lambda to: self._gloo.allreduce([to], opts).wait())

    def alltoall_base(self, out: Tensor, inp: Tensor, out_splits: Any, in_splits: Any, opts: Any = None) -> FakeWork:
        options = dist.AllToAllOptions()
        return self._start((), out, lambda to: self._gloo.alltoall_base(to, inp, out_splits, in_splits, options).wait())

    all_to_all_single = alltoall_base  # the name of later versions

    def _allgather_base(self, out: Tensor, inp: Tensor, opts: Any = None) -> FakeWork:
        def gather(to: Tensor) -> None:
            self._gloo.allgather([list(to.view(self.size(), -1))], [inp.reshape(-1)]).wait()

        return self._start((), out, gather)

    all_gather_single = _allgather_base  # the name of later versions

    def _reduce_scatter_base(self, out: Tensor, inp: Tensor, opts: Any = None) -> FakeWork:
        def reduce(to: Tensor) -> None:
            total = inp.clone()
            self._gloo.allreduce([total]).wait()
            to.copy_(total.view(self.size(), *to.shape)[self.rank()])

        return self._start((), out, reduce)

    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors: Any, peer: int, tag: int) -> FakeWork:
        return self._start(self._pair(peer), None, lambda _: self._gloo.send([tensors[0]], peer, 0).wait())

    def recv(self, tensors: Any, peer: int, tag: int) -> FakeWork:
        return self._start(self._pair(peer), tensors[0], lambda to: self._gloo.recv([to], peer, 0).wait())

    def _pair(self, peer: int) -> tuple[int, int]:
        return min(self.rank(), peer), max(self.rank(), peer)


@contextmanager
def fake_nccl() -> Iterator[Device]:
    """Let this rank compute and communicate like that inside."""
    FakeNccl.device = device = Device()
    new_group: Any = dist.new_group
    run = executor.Executor.run
    set_cuda_environment(os.environ)  # as `join` does where PyTorch is built for CUDA

    def made(*args: Any, backend: str | None = None, pg_options: object = None, **options: Any) -> Any:
        group = new_group(*args, backend="fake_nccl" if backend == "nccl" else backend, **options)
        if isinstance(group, FakeNccl):
            group.name = dist.distributed_c10d._world.pg_names[group]
        return group

    def run_on_device(*args: Any, **options: Any) -> Any:
        device.entered = True
        try:
            with device:
                return run(*args, **options)
        finally:
            device.entered = False

    if "fake_nccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("fake_nccl", FakeNccl, devices=["cpu"])
    with (
        mock.patch.object(dist, "new_group", made),
        mock.patch.object(launch, "backend_of", return_value="nccl"),
        mock.patch.object(executor, "streams_of", return_value=Streams(device)),
        mock.patch.object(executor.Executor, "run", run_on_device),
        mock.patch.object(slice_copy, "move", slice_copy.reference),
    ):
        yield device

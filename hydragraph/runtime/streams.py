"""Queues of work on one device, one per stream of a RankProgram, and the marks that order them.

On a CPU, an operation is complete when its call returns, and the host waits for communication. On CUDA, the host only
queues work, and marks are events for which other streams wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hydragraph.ir.instruction import Stream

Mark = Any  # a queue position
Reading = Any  # a clock's value


class Clock(Protocol):
    """Clock that measures when the current queue reaches a point."""

    def now(self) -> Reading:
        """Return a reading, which `seconds` converts."""

    def seconds(self, reading: Reading) -> float:
        """Convert a reading to the scale of `time.perf_counter`; the queues must have finished."""


class DeviceStreams(Protocol):
    """A device's queues.

    Attributes:
        queued: whether waits for communication are queued; if not, the host waits.
    """

    queued: bool

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue the calls of this context on a stream; other calls are queued on `Stream.COMPUTE`."""

    def beside(self) -> AbstractContextManager[None]:
        """Queue the calls of this context on a separate stream, which runs no instructions."""

    def mark(self) -> Mark:
        """Mark the end of the current queue."""

    def wait(self, mark: Mark) -> None:
        """Make later work of the current queue wait for a mark."""

    def passed(self, mark: Mark) -> bool:
        """Return whether a queue has reached its mark."""

    def reach(self, mark: Mark) -> None:
        """Make the host wait until a mark is reached."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current queue reaches this point, even if the tensor is dropped."""

    def finish(self) -> None:
        """Wait for all queues."""

    def clock(self) -> Clock:
        """Return a clock for one iteration."""


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, reading: float) -> float:
        return reading


class HostStreams:
    """Streams of a CPU, without queues."""

    queued = False

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        """Do nothing."""

    def passed(self, mark: Mark) -> bool:
        return True

    def reach(self, mark: Mark) -> None:
        """Do nothing."""

    def hold(self, tensor: Tensor) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def clock(self) -> Clock:
        return HostClock()


class CudaClock:
    def __init__(self) -> None:
        self._first = self.now()
        self._began = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, reading: torch.cuda.Event) -> float:
        return self._began + float(self._first.elapsed_time(reading)) / 1e3


class CudaStreams:
    """Streams of a GPU; computation runs on the current stream.

    Args:
        queued: whether communication is queued (NCCL or a single rank); with gloo, the host waits for it.
    """

    def __init__(self, device: torch.device, queued: bool) -> None:
        self.queued = queued
        self._device = device
        # High priority, because other ranks wait for messages.
        self._streams = {s: torch.cuda.Stream(device, priority=-1) for s in Stream if s is not Stream.COMPUTE}
        self._beside = torch.cuda.Stream(device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        if stream is Stream.COMPUTE:
            yield
        else:
            with torch.cuda.stream(self._streams[stream]):
                yield

    def beside(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._beside)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.wait()

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def reach(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def hold(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        for stream in self._streams.values():
            stream.synchronize()

    def clock(self) -> Clock:
        return CudaClock()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def streams_of(device: torch.device, backend: str, ranks: int) -> DeviceStreams:
    """Return a device's queues; `backend` is "gloo" or "nccl"."""
    return CudaStreams(device, backend == "nccl" or ranks == 1) if device.type == "cuda" else HostStreams()

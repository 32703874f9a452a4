"""Queues of work on one device, one for each stream of a RankProgram, and the marks that order them.

A CPU has none: an operation is done when its call returns, and the host itself waits for communication. On CUDA every
stream of the program is a stream of the device; the host only queues, and a mark is an event.

How a value crosses from one stream to another, such as weights that are pulled and then computed with:

    on(PULL)     start the message; mark() -> m behind what puts the weights in their buffer
    on(COMPUTE)  wait(m), then use them: the device waits, the host goes on at once
    hold(w)      where w may be dropped by the host before the stream that reads it got there: the allocator must not
                 hand its memory out until then
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hydragraph.ir.instruction import Stream

Mark = Any  # a point in a queue, known to the streams that made it
Reading = Any  # of a clock


class Clock(Protocol):
    """Reads the time at which the current queue gets to a point."""

    def now(self) -> Reading:
        """Return what `seconds` translates."""

    def seconds(self, reading: Reading) -> float:
        """Return a reading on the scale of `time.perf_counter`; the queues must have been finished."""


class DeviceStreams(Protocol):
    """What the executor needs of a device.

    Attributes:
        queued: whether waiting for communication is itself queued; otherwise the host waits.
    """

    queued: bool

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue what is called inside on a stream; outside is `Stream.COMPUTE`."""

    def beside(self) -> AbstractContextManager[None]:
        """Queue what is called inside on a stream that no instruction has."""

    def mark(self) -> Mark:
        """Mark the end of the current queue."""

    def wait(self, mark: Mark) -> None:
        """Let what the current queue gets from now on wait for a mark."""

    def passed(self, mark: Mark) -> bool:
        """Say whether a mark's queue has got there."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory, once it is dropped, until the current queue has got as far as it is then."""

    def finish(self) -> None:
        """Wait for all queues."""

    def clock(self) -> Clock:
        """Return a clock, for one iteration."""


class HostClock:
    """Reads the host's time."""

    def now(self) -> float:
        """Return seconds."""
        return time.perf_counter()

    def seconds(self, reading: float) -> float:
        """Return the reading."""
        return reading


class HostStreams:
    """Of a CPU: nothing is queued, so everything is in order."""

    queued = False

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def mark(self) -> Mark:
        """Return nothing to wait for."""
        return None

    def wait(self, mark: Mark) -> None:
        """Do nothing."""

    def passed(self, mark: Mark) -> bool:
        """Say yes."""
        return True

    def hold(self, tensor: Tensor) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def clock(self) -> Clock:
        """Return the host's clock."""
        return HostClock()


class CudaClock:
    """Reads a GPU's time by events, counted from one that is recorded now."""

    def __init__(self) -> None:
        self._first = self.now()
        self._began = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, reading: torch.cuda.Event) -> float:
        """Return when the event was reached."""
        return self._began + float(self._first.elapsed_time(reading)) / 1e3


class CudaStreams:
    """Of a GPU: computation stays on the stream that is current now, each other stream of the program has its own.

    Args:
        device: the GPU.
        queued: whether communication is queued too (NCCL, or a single rank); with gloo the host waits for it.
    """

    def __init__(self, device: torch.device, queued: bool) -> None:
        self.queued = queued
        self._device = device
        # Messages are short and others wait for them, so they go first where the GPU has a choice.
        self._streams = {s: torch.cuda.Stream(device, priority=-1) for s in Stream if s is not Stream.COMPUTE}
        self._beside = torch.cuda.Stream(device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make the stream current."""
        if stream is Stream.COMPUTE:
            yield
        else:
            with torch.cuda.stream(self._streams[stream]):
                yield

    def beside(self) -> AbstractContextManager[None]:
        """Make a stream current that no instruction has."""
        return torch.cuda.stream(self._beside)

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        mark.wait()

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Ask an event."""
        return bool(mark.query())

    def hold(self, tensor: Tensor) -> None:
        """Tell the allocator of the current stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Wait for the streams."""
        torch.cuda.current_stream(self._device).synchronize()
        for stream in self._streams.values():
            stream.synchronize()

    def clock(self) -> Clock:
        """Return a clock that starts now."""
        return CudaClock()


def streams_of(device: torch.device, backend: str, ranks: int) -> DeviceStreams:
    """Return the queues of a device whose ranks talk through a backend ("gloo" or "nccl")."""
    return CudaStreams(device, backend == "nccl" or ranks == 1) if device.type == "cuda" else HostStreams()

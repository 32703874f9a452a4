"""Queues of work on one device, one per stream of a RankProgram, and marks that order them.

On a CPU, operations end when calls return, and the host waits for communication. On CUDA, the host queues work, and
marks are events for which streams wait.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hydragraph.ir.instruction import Stream

# A queue position
Mark = Any
# A clock's value
Reading = Any


class Clock:
    """Clock of the current queue's progress; without a queue, the host's clock."""

    def now(self) -> Reading:
        """Return a reading, which `seconds` converts."""
        return time.perf_counter()

    def seconds(self, reading: Reading) -> float:
        """Convert a reading to `time.perf_counter`'s scale; the queues must have finished."""
        return float(reading)


class CudaClock(Clock):
    def __init__(self) -> None:
        self._first = self.now()
        self._began = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, reading: torch.cuda.Event) -> float:
        return self._began + float(self._first.elapsed_time(reading)) / 1e3


class DeviceStreams:
    """A device's queues; on a CPU, most methods do nothing.

    Attributes:
        queued: whether waits for communication are queued; if not, the host waits.
    """

    queued = False

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue this context's calls on a stream; other calls are on `Stream.COMPUTE`."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Queue this context's calls on a stream without instructions."""
        return nullcontext()

    def mark(self) -> Mark:
        """Mark the end of the current queue."""
        return None

    def wait(self, mark: Mark) -> None:
        """Make the current queue's later work wait for a mark."""

    def passed(self, mark: Mark) -> bool:
        """Return whether a queue has reached its mark."""
        return True

    def reach(self, mark: Mark) -> None:
        """Make the host wait until a mark is reached."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a dropped tensor's memory until the current queue reaches this point."""

    def finish(self) -> None:
        """Wait for all queues."""

    def clock(self) -> Clock:
        """Return a clock for one iteration."""
        return Clock()


class CudaStreams(DeviceStreams):
    """Streams of a GPU; computation runs on the current stream.

    Args:
        queued: false with gloo, where the host waits for communication.
    """

    def __init__(self, device: torch.device, queued: bool) -> None:
        self.queued = queued
        self._device = device
        # High priority: other ranks wait for messages.
        self._streams = {s: torch.cuda.Stream(device, priority=-1) for s in Stream if s is not Stream.COMPUTE}
        self._beside = torch.cuda.Stream(device)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext() if stream is Stream.COMPUTE else torch.cuda.stream(self._streams[stream])

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
    return CudaStreams(device, backend == "nccl" or ranks == 1) if device.type == "cuda" else DeviceStreams()

"""Probe of an idle device's speed, in small matrix products per second.

If a slow device gets no work (Malleus's standby), only a probe shows when it is fast again. A device that stops for 60
of every 100 ms looks healthy for 40 ms, so a probe measures from the end of one stop to the end of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hydragraph.runtime.streams import synchronise
from hydragraph.runtime.thread_times import ThreadTimes, unknown

# Rows and columns
SIZES = {"cpu": 128, "cuda": 2048}
MOST_S = 0.25  # longest probe
# If a product takes longer, the process was stopped
STOP_S = 0.01


@dataclass(frozen=True)
class ProbeResult:
    """A probe's result.

    Attributes:
        per_s: products per second of an unshared core; 0 if the probe did not run.
        ran: seconds that the thread ran; 0 if unknown.
        queued: seconds that it waited for its core; 0 if unknown.
    """

    per_s: float = 0.0
    ran: float = 0.0
    queued: float = 0.0


@dataclass(frozen=True)
class _ClockReading:
    seconds: float
    ran: float
    queued: float
    count: int


class SpeedProbe:
    """Probe of one device for `most_s` seconds per call; `scheduled` reads this thread's times."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        scheduled: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._device = device
        self._clock = clock
        self._scheduled = scheduled or (ThreadTimes() if device.type == "cpu" else unknown)
        self.most_s = 0.0

    def __call__(self) -> ProbeResult:
        if self.most_s <= 0:
            return ProbeResult()
        size = SIZES[self._device.type]
        factor = torch.ones(size, size, device=self._device) / size
        out = torch.empty_like(factor)
        self._multiply(factor, out)  # warm-up
        began = self._read(0)
        now, count = began.seconds, 0
        stops = []
        while now < began.seconds + self.most_s:
            before = now
            self._multiply(factor, out)
            count += 1
            now = self._clock()
            # The process was stopped during this product, and now runs again.
            if now - before > STOP_S:
                stops.append(self._read(count))
        if len(stops) > 1:
            return _between(stops[0], stops[-1])
        return _between(began, self._read(count))

    def _read(self, count: int) -> _ClockReading:
        return _ClockReading(self._clock(), *self._scheduled(), count)

    def _multiply(self, factor: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(factor, factor, out=out)
        synchronise(self._device)


def _between(began: _ClockReading, ended: _ClockReading) -> ProbeResult:
    ran, queued = ended.ran - began.ran, ended.queued - began.queued
    # crowded: speedup of the probe if its core were not shared.
    crowded = (ran + queued) / ran if ran > 0 else 1.0
    return ProbeResult(crowded * (ended.count - began.count) / (ended.seconds - began.seconds), ran, queued)

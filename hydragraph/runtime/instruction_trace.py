"""Timing of an iteration: waits by kind and, if requested, each instruction's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from hydragraph.cost.trace_file import TraceEvent
from hydragraph.ir.instruction import Stream
from hydragraph.runtime.speed_probe import ProbeResult
from hydragraph.runtime.streams import Clock, Reading


@dataclass(frozen=True)
class ExposedSeconds:
    """Seconds of waits for weights, gradients, activations, and copies to and from the host."""

    pull: float = 0.0
    push: float = 0.0
    p2p: float = 0.0
    offload: float = 0.0


@dataclass(frozen=True)
class RankTimes:
    """One rank's times of an iteration, which the commit sends to all ranks.

    Attributes:
        seconds: time from the first instruction until work before the commit ends.
        own: seconds of the blocks of each template in `Program.kinds`, without waits for ranks.
        ran: seconds of `own` (or the probe) in which the thread ran; 0 if unknown.
        queued: seconds of `own` (or the probe) in which the thread waited for its core; 0 if unknown.
        probe: products per second (`runtime.speed_probe`), or 0.
    """

    seconds: float
    exposed: ExposedSeconds
    own: tuple[float, ...] = ()
    ran: float = 0.0
    queued: float = 0.0
    probe: float = 0.0

    @property
    def busy_s(self) -> float:
        exposed = self.exposed
        return self.seconds - exposed.pull - exposed.push - exposed.p2p - exposed.offload


def mean_exposed(ranks: Sequence[RankTimes]) -> ExposedSeconds:
    kinds = (astuple(times.exposed) for times in ranks)
    return ExposedSeconds(*(sum(kind) / len(ranks) for kind in zip(*kinds, strict=True)))


class Timing:
    """Measurements of one rank's iteration.

    The device's queues must have finished before a property is read or `end` is called.

    Args:
        spans: list that receives every instruction and message, or None to sum only waits.
        clock: the device's clock (`DeviceStreams.clock`); default: the host's.
    """

    def __init__(self, step: int = 0, spans: list[TraceEvent] | None = None, clock: Clock | None = None) -> None:
        self.spans = spans
        self.kinds = 0
        self._probe = 0.0
        self._works: list[tuple[int, Reading, Reading, float]] = []
        self._ran = 0.0
        self._queued = 0.0
        self._step = step
        self._clock = clock or Clock()
        self._waits: list[tuple[Stream, Reading, Reading]] = []
        self._parts: list[tuple[Stream, str, Reading, Reading]] = []
        self._started: dict[str, Reading] = {}
        self._began = time.perf_counter()
        # Only wall clocks can be compared between hosts
        self._offset = time.time() - time.perf_counter()

    @property
    def exposed(self) -> ExposedSeconds:
        waited = dict.fromkeys(Stream, 0.0)
        for stream, began, ended in self._waits:
            waited[stream] += self._clock.seconds(ended) - self._clock.seconds(began)
        return ExposedSeconds(*(waited[stream] for stream in (Stream.PULL, Stream.PUSH, Stream.P2P, Stream.OFFLOAD)))

    @property
    def times(self) -> RankTimes:
        return RankTimes(
            time.perf_counter() - self._began, self.exposed, self.own, self._ran, self._queued, self._probe
        )

    @property
    def own(self) -> tuple[float, ...]:
        sums = [0.0] * self.kinds
        for kind, began, ended, waited in self._works:
            sums[kind] += max(0.0, self._clock.seconds(ended) - self._clock.seconds(began) - waited)
        return tuple(sums)

    def started(self, value: str) -> None:
        if self.spans is not None:
            self._started[value] = self._clock.now()

    @contextmanager
    def waiting(self, stream: Stream, value: str, more: bool = False) -> Iterator[None]:
        """Time a wait for a message; `more` means that the value needs another."""
        began = self._clock.now()
        yield
        ended = self._clock.now()
        self._waits.append((stream, began, ended))
        self._add(Stream.COMPUTE, f"wait {value}", began, ended)
        if value in self._started and not more:
            self._add(stream, value, self._started.pop(value), ended)

    @contextmanager
    def computing(
        self, kind: int, waited: Callable[[], float], scheduled: Callable[[], tuple[float, float]]
    ) -> Iterator[None]:
        """Time a template's block, without waits for other ranks.

        Args:
            kind: the template's index in `Program.kinds`.
            waited: returns the total seconds waited for other ranks.
            scheduled: reader of this thread's times, like `ThreadTimes`.
        """
        before = waited()
        ran, queued = scheduled()
        began = self._clock.now()
        yield
        self._works.append((kind, began, self._clock.now(), waited() - before))
        now = scheduled()
        self._ran += now[0] - ran
        self._queued += now[1] - queued

    def probed(self, found: ProbeResult) -> None:
        self._probe = found.per_s
        # An idle rank has only probed.
        if not self._works:
            self._ran = found.ran
            self._queued = found.queued

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        if self.spans is None:
            yield
            return
        began = self._clock.now()
        yield
        self._add(Stream.COMPUTE, name, began, self._clock.now())

    def end(self) -> None:
        if self.spans is None:
            return
        for stream, name, began, ended in self._parts:
            begin, end = (self._clock.seconds(reading) + self._offset for reading in (began, ended))
            self.spans.append(TraceEvent(self._step, stream.value, name, begin, end))
        self._parts.clear()

    def _add(self, stream: Stream, name: str, began: Reading, ended: Reading) -> None:
        if self.spans is not None:
            self._parts.append((stream, name, began, ended))

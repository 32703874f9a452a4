"""Where an iteration's time goes: waits per kind of traffic, and, where it is asked for, every instruction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydragraph.cost.trace_file import Event, TracedStep, write_events
from hydragraph.ir.instruction import Stream
from hydragraph.runtime.speed_probe import Probed
from hydragraph.runtime.streams import Clock, HostClock, Reading


@dataclass(frozen=True)
class Exposed:
    """Seconds that computation, or the end of the step, waited for communication that it did not hide.

    Attributes:
        pull, push, p2p: for weights, for gradients on their way to their owners, and for activations.
    """

    pull: float = 0.0
    push: float = 0.0
    p2p: float = 0.0


@dataclass(frozen=True)
class RankTimes:
    """How one rank spent an iteration, as all ranks learn it at the commit.

    Attributes:
        seconds: from its first instruction until it came to the commit, with nothing under way any more.
        exposed: what of that it waited for communication.
        own: seconds in which it computed blocks, by their template in the order of `Program.kinds`, without what it
            waited for other ranks inside of them.
        ran, queued: of these, seconds that its thread ran, and that it was ready to but others had its core; both 0
            where that is not known, as on a GPU. Of a rank that computed none, of its probe.
        probe: products per second in a probe (`runtime.probe`); 0: it made none.
    """

    seconds: float
    exposed: Exposed
    own: tuple[float, ...] = ()
    ran: float = 0.0
    queued: float = 0.0
    probe: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which it did not wait: it computed, or prepared to."""
        return self.seconds - self.exposed.pull - self.exposed.push - self.exposed.p2p


def mean_exposed(ranks: Sequence[RankTimes]) -> Exposed:
    """Return the mean over ranks of what each waited for."""
    kinds = ([times.exposed.pull, times.exposed.push, times.exposed.p2p] for times in ranks)
    return Exposed(*(sum(kind) / len(ranks) for kind in zip(*kinds, strict=True)))


@dataclass(frozen=True)
class Span:
    """Something that took time on one rank: when it began and ended, in seconds of the wall clock."""

    step: int
    stream: str
    name: str
    begin: float
    end: float


class Timing:
    """What one rank measures during one iteration.

    Args:
        step: the iteration's number, which its spans carry.
        spans: a list to which every instruction and message is added; None: only waits are added up.
        clock: reads the device's queues (`DeviceStreams.clock`); default: the host's time.
        kinds: how many templates blocks have.

    Attributes:
        kinds: how many templates blocks have; what runs them says so.
    """

    def __init__(self, step: int = 0, spans: list[Span] | None = None, clock: Clock | None = None) -> None:
        self.spans = spans
        self.kinds = 0
        self._probe = 0.0
        self._works: list[tuple[int, Reading, Reading, float]] = []
        self._ran = 0.0
        self._queued = 0.0
        self._step = step
        self._clock = clock or HostClock()
        self._waits: list[tuple[Stream, Reading, Reading]] = []
        self._parts: list[tuple[Stream, str, Reading, Reading]] = []
        self._started: dict[str, Reading] = {}
        self._began = time.perf_counter()
        self._offset = time.time() - time.perf_counter()  # ranks of different hosts share the wall clock only

    @property
    def exposed(self) -> Exposed:
        """What was waited for; the device's queues must have been finished."""
        waited = {Stream.PULL: 0.0, Stream.PUSH: 0.0, Stream.P2P: 0.0}
        for stream, began, ended in self._waits:
            waited[stream] += self._clock.seconds(ended) - self._clock.seconds(began)
        return Exposed(waited[Stream.PULL], waited[Stream.PUSH], waited[Stream.P2P])

    @property
    def times(self) -> RankTimes:
        """How this rank has spent the iteration so far; the device's queues must have been finished."""
        return RankTimes(
            time.perf_counter() - self._began, self.exposed, self.own, self._ran, self._queued, self._probe
        )

    @property
    def own(self) -> tuple[float, ...]:
        """Seconds in which this rank computed, by template; the device's queues must have been finished."""
        sums = [0.0] * self.kinds
        for kind, began, ended, waited in self._works:
            sums[kind] += max(0.0, self._clock.seconds(ended) - self._clock.seconds(began) - waited)
        return tuple(sums)

    def started(self, value: str) -> None:
        """Note that a message is on its way."""
        if self.spans is not None:
            self._started[value] = self._clock.now()

    @contextmanager
    def waiting(self, stream: Stream, value: str, more: bool = False) -> Iterator[None]:
        """Time a wait for a message of a stream; `more`: another one brings the value on from there."""
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
        """Time a block of a template, without what it waits for other ranks.

        Args:
            kind: the template's place in `Program.kinds`.
            waited: gives the seconds that the host has waited for other ranks, ever.
            scheduled: gives the seconds that this thread ran and was queued, ever.
        """
        before = waited()
        ran, queued = scheduled()
        began = self._clock.now()
        yield
        self._works.append((kind, began, self._clock.now(), waited() - before))
        now = scheduled()
        self._ran += now[0] - ran
        self._queued += now[1] - queued

    def probed(self, found: Probed) -> None:
        """Take down what a probe found."""
        self._probe = found.per_s
        if not self._works:
            self._ran, self._queued = found.ran, found.queued

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Time an instruction; one of another stream than computation is only started, which holds that up too."""
        if self.spans is None:
            yield
            return
        began = self._clock.now()
        yield
        self._add(Stream.COMPUTE, name, began, self._clock.now())

    def end(self) -> None:
        """Write the spans down; the device's queues must have been finished."""
        if self.spans is None:
            return
        for stream, name, began, ended in self._parts:
            begin, end = (self._clock.seconds(reading) + self._offset for reading in (began, ended))
            self.spans.append(Span(self._step, stream.value, name, begin, end))
        self._parts.clear()

    def _add(self, stream: Stream, name: str, began: Reading, ended: Reading) -> None:
        if self.spans is not None:
            self._parts.append((stream, name, began, ended))


def write_trace(per_rank: Iterable[Iterable[Span]], path: Path, steps: Sequence[TracedStep] = ()) -> None:
    """Write all ranks' spans in the Trace Event Format, which https://ui.perfetto.dev opens: a process per rank.

    Args:
        per_rank: each rank's spans, in the order of the ranks.
        path: a .json file.
        steps: what the iterations ran, for `hydragraph compare`.
    """
    write_events(map(events_of, per_rank), path, steps)


def events_of(spans: Iterable[Span]) -> tuple[Event, ...]:
    """Return a rank's spans as the events of a trace."""
    return tuple(Event(s.step, s.stream, s.name, s.begin, s.end) for s in spans)

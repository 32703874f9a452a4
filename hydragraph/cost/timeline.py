"""Simulated times of one iteration, instruction by instruction.

A stage has a queue per stream. An instruction waits for its inputs and for the previous instruction in its queue; pulls
and pushes also wait for all ranks that exchange data, and the commit for all ranks. Computation includes
tensor-parallel traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from hydragraph.cost.actors import Actor, ActorProgram
from hydragraph.cost.critical_path import CriticalPath, critical_path
from hydragraph.cost.event_simulation import EventSimulation, Times
from hydragraph.cost.instruction_work import InstructionCosts
from hydragraph.ir.instruction import RULES, Instruction, Op, Stream
from hydragraph.spec.cluster import Cluster

if TYPE_CHECKING:
    from hydragraph.cost.rank_memory import MemoryCurve

T = TypeVar("T")

_COMPUTING = tuple(op for op, rule in RULES.items() if rule.stream is Stream.COMPUTE)


class SimulatedSpan(NamedTuple):
    """An instruction with its times in seconds."""

    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class LazySequence(Sequence[T]):
    """Values of a function at 0 to `count` - 1, computed at access."""

    def __init__(self, count: int, of: Callable[[int], T]) -> None:
        self._count = count
        self._of = of

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> T:  # pyrefly: ignore[bad-override]  # no slices
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._of(index)


def _aligned(
    instructions: Sequence[Instruction], first: Sequence[Instruction], times: Times
) -> Iterator[SimulatedSpan]:
    at = 0
    end = 0.0
    for instruction in instructions:
        op = instruction.op
        if op is Op.FREE:
            yield SimulatedSpan(instruction, end, end)
            continue
        while first[at].op is Op.FREE or (first[at].op is Op.SEND and op is not Op.SEND):
            at += 1
        yield SimulatedSpan(instruction, times.begin[at], times.end[at])
        if op in _COMPUTING:
            end = times.end[at]
        at += 1


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of ranks' instructions, from the iteration's start."""

    actors: tuple[Actor, ...]
    times: tuple[Times, ...] = field(repr=False)
    curves: Curves | None = field(default=None, repr=False)

    @cached_property
    def actor_of(self) -> dict[int, int]:
        return {
            rank: a for a, actor in sorted(enumerate(self.actors), key=lambda p: p[1].ranks) for rank in actor.ranks
        }

    @property
    def ranks(self) -> Sequence[tuple[SimulatedSpan, ...]]:
        return LazySequence(len(self.actor_of), self._of_rank)

    def _of_rank(self, rank: int) -> tuple[SimulatedSpan, ...]:
        a = self.actor_of[rank]
        return tuple(_aligned(self.actors[a].of(rank), self.actors[a].program.instructions, self.times[a]))

    @cached_property
    def seconds(self) -> float:
        return max((max(times.end, default=0.0) for times in self.times), default=0.0)

    @cached_property
    def critical_path(self) -> CriticalPath:
        return critical_path(self.actors, self.times)

    @cached_property
    def memory(self) -> Sequence[MemoryCurve]:
        """Memory of each rank over time; raises a ValueError if the timeline was not simulated from `Costs`."""
        if self.curves is None:
            raise ValueError("this timeline has no memory data: use hg.simulate(costs, strategy, assignment)")
        return self.curves(self)

    def busy_s(self, rank: int, stream: Stream) -> float:
        return self._busy[self.actor_of[rank]][stream]

    @cached_property
    def _busy(self) -> list[dict[Stream, float]]:
        by_actor = []
        for actor, times in zip(self.actors, self.times, strict=True):
            busy = dict.fromkeys(Stream, 0.0)
            # A push can start while the previous one sends to second owners.
            until = dict.fromkeys(Stream, 0.0)
            for instruction, begin, end in zip(actor.program.instructions, times.begin, times.end, strict=True):
                stream = instruction.stream
                begin = max(begin, until[stream])
                if end > begin:
                    busy[stream] = busy[stream] + end - begin
                    until[stream] = end
            by_actor.append(busy)
        return by_actor

    def exposed_s(self, rank: int, stream: Stream) -> float:
        """Return the seconds that computation or commit waits for a stream, including time before transfers begin."""
        return self._exposed[self.actor_of[rank]][stream]

    @cached_property
    def _exposed(self) -> list[dict[Stream, float]]:
        return [_waits(actor.program, times) for actor, times in zip(self.actors, self.times, strict=True)]

    @property
    def bubble(self) -> float:
        """Idle fraction of computing ranks, 0 to 1."""
        working = [rank for rank in self.actor_of if self.busy_s(rank, Stream.COMPUTE) > 0]
        if not working:
            return 0.0
        busy = sum(self.busy_s(rank, Stream.COMPUTE) for rank in working) / (len(working) * self.seconds)
        return max(0.0, 1 - busy)  # rounding errors

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline in the Trace Event Format, which https://ui.perfetto.dev opens."""
        from hydragraph.cost.trace_file import TraceEvent, write_events
        from hydragraph.ir.instruction_text import instruction_text

        def events(rank: int) -> Iterator[TraceEvent]:
            for span in self.ranks[rank]:
                if span.seconds > 0:
                    name = " ".join(instruction_text(span.instruction).split())
                    yield TraceEvent(0, span.instruction.stream.value, name, span.start_s, span.end_s)

        write_events((events(rank) for rank in range(len(self.actor_of))), Path(path))

    def __str__(self) -> str:
        copies = any(self.busy_s(actor.ranks[0], Stream.OFFLOAD) for actor in self.actors)
        streams = [stream for stream in Stream if copies or stream is not Stream.OFFLOAD]
        names = "".join(f"{stream.value:>12}" for stream in streams)
        lines = [f"rank{names}        idle"]
        for rank in range(len(self.actor_of)):
            busy = "".join(f"{1e3 * self.busy_s(rank, stream):>9.3f} ms" for stream in streams)
            idle = 1 - self.busy_s(rank, Stream.COMPUTE) / self.seconds if self.seconds else 0.0
            lines.append(f"{rank:>4}{busy}{idle:>11.1%}")
        return "\n".join([*lines, f"iteration {1e3 * self.seconds:.3f} ms, bubble {self.bubble:.1%}"])


Curves: TypeAlias = Callable[[Timeline], "Sequence[MemoryCurve]"]


def _waits(program: ActorProgram, times: Times) -> dict[Stream, float]:
    waited = dict.fromkeys(Stream, 0.0)
    end = times.end
    free = 0.0
    for i in program.compute:
        needed = program.needs[i]
        if program.instructions[i].op is Op.COMMIT:
            transfers = (program.pulls, program.pushes, (*program.sends, *program.receives))
            needed = tuple(max(indices, key=end.__getitem__) for indices in transfers if indices)
        for other in needed:
            if end[other] > free:
                waited[program.instructions[other].stream] += end[other] - free
                free = end[other]
        free = max(free, end[i])
    return waited


def run(
    actors: Sequence[Actor],
    cluster: Cluster,
    work: InstructionCosts,
    curves: Curves | None = None,
) -> Timeline:
    """Simulate actors that together contain all ranks; raise a ValueError if the programs never end."""
    return Timeline(tuple(actors), tuple(EventSimulation(actors, cluster, work).run()), curves)

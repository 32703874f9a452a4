"""Traces as a real run writes them, of runs that went exactly as some costs say."""

from __future__ import annotations

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.timeline import Timeline
from hydragraph.cost.trace_file import Trace, TracedStep, TraceEvent
from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.value import gradients, message, weights
from hydragraph.spec.assignment import Assignment


def traced(costs: Costs, strategy: hg.Strategy, assignment: Assignment, steps: int = 1, first: int = 1) -> Trace:
    """Return the trace of steps that all went as a simulation says."""
    timeline = costs.simulate(strategy, assignment)
    ranks: list[list[TraceEvent]] = [[] for _ in range(costs.ranks)]
    for step in range(first, first + steps):
        for rank in range(costs.ranks):
            ranks[rank] += events(timeline, rank, step, 10.0 * step)
    every = tuple(TracedStep(s, str(strategy), assignment, timeline.seconds) for s in range(first, first + steps))
    return Trace(every, tuple(map(tuple, ranks)))


def events(timeline: Timeline, rank: int, step: int, start: float) -> list[TraceEvent]:
    """Return one rank's events: instructions, waits before or inside of them, and messages from their start on."""
    a = timeline.actor_of[rank]
    program = timeline.actors[a].program
    times = timeline.times[a]
    found = []

    def add(stream: Stream, name: str, begin: float, end: float) -> None:
        found.append(TraceEvent(step, stream.value, name, start + begin, start + end))

    def ready(i: int) -> float:
        return max((times.end[need] for need in program.needs[i]), default=0.0)

    def name_of(j: int) -> str:
        transfer = program.instructions[j]
        if transfer.op is Op.SEND:  # each rank of a stage has receivers of its own
            return message(transfer.reads[0], dict(timeline.actors[a].pairs(j))[rank])
        if transfer.op is Op.PULL:
            return weights(transfer.target)
        return gradients(transfer.target) if transfer.op is Op.PUSH else transfer.writes[0]

    sends = [j for j in program.sends if rank in dict(timeline.actors[a].pairs(j))]
    transfers = (*program.pulls, *program.pushes, *sends, *program.receives)
    for j in transfers:
        add(program.instructions[j].stream, name_of(j), ready(j), times.end[j])
    free = 0.0
    for i in program.compute:
        instruction = program.instructions[i]
        commits = instruction.op is Op.COMMIT
        arrived = free
        for j in sorted(transfers, key=lambda j: times.end[j]) if commits else program.needs[i]:
            if times.end[j] > free:
                add(Stream.COMPUTE, f"wait {name_of(j)}", free, times.end[j])
                free = times.end[j]
        # A commit has its waits inside: the rank is in it from when it came.
        add(Stream.COMPUTE, instruction_text(instruction), arrived if commits else free, times.end[i])
        free = times.end[i]
    return found

"""Conversion of simulated and traced iterations to lanes of bars.

Simulated ranks with equal timelines share a lane. If there are too many bars, bars of consecutive blocks of a
micro-batch are merged, then bars close to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from hydragraph.cost.actors import Actor, message_of
from hydragraph.cost.critical_path import runs
from hydragraph.cost.event_simulation import Times
from hydragraph.cost.timeline import Timeline
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.instruction_text import parse_instruction
from hydragraph.report.facts import STREAMS, IterationView, TimeBar, TimelineLane

# Maximum bars, to keep pages below 5 MB.
MOST_BARS = 24_000
# Maximum ranks with separate lanes.
EVERY = 32
# Maximum lanes; of more, evenly spaced ones are shown.
MOST_LANES = 256
# Shortest interval of merged bars, as a fraction of the iteration.
FINEST = 1 / 4000

# Prefixes of value names (`ir.value`).
_VALUES = {
    "W": "weights",
    "G": "gradients",
    "h": "hidden state",
    "d": "gradient",
    "f": "activations",
    "c": "activations",
}

T = TypeVar("T")
Merge = Callable[[Sequence[TimeBar]], Iterable[TimeBar]]


def simulated_course(timeline: Timeline) -> IterationView:
    together: dict[object, list[int]] = {}
    for a, actor in enumerate(timeline.actors):
        # together: (program, times) -> actors with equal lanes; equal pipelines share programs
        same = (id(actor.program), timeline.times[a].begin.tobytes(), timeline.times[a].end.tobytes())
        together.setdefault(same, []).append(a)
    groups = sorted(together.values(), key=lambda actors: min(min(timeline.actors[a].ranks) for a in actors))
    shown = _spread(groups, MOST_LANES)
    lanes = []
    for actors in shown:
        first = timeline.actors[actors[0]]
        ranks = tuple(sorted(rank for a in actors for rank in timeline.actors[a].ranks))
        bars = simulated_bars(first, timeline.times[actors[0]])
        lanes.append(TimelineLane(ranks, _roles([timeline.actors[a] for a in actors]), bars))
    merged, note = _fewer(lanes, timeline.seconds)
    if len(timeline.actor_of) <= EVERY:
        alone = (replace(lane, ranks=(rank,)) for lane in merged for rank in lane.ranks)
        merged = sorted(alone, key=attrgetter("ranks"))
    if len(shown) < len(groups):
        note = f"{len(shown)} of {len(groups)} kinds of ranks are shown, evenly spaced. {note}"
    return IterationView("simulated", timeline.seconds, tuple(merged), timeline.critical_path, note.strip())


def measured_course(title: str, ranks: Sequence[Sequence[TraceEvent]]) -> IterationView:
    first = min((event.begin for events in ranks for event in events), default=0.0)
    last = max((event.end for events in ranks for event in events), default=0.0)
    lanes = [
        TimelineLane((rank,), "", _by_stream(sorted(_measured(events, first), key=lambda pair: pair[1].begin)))
        for rank, events in _spread(list(enumerate(ranks)), MOST_LANES)
    ]
    merged, note = _fewer(lanes, last - first)
    if len(lanes) < len(ranks):
        note = f"{len(lanes)} of {len(ranks)} ranks are shown, evenly spaced. {note}"
    return IterationView(title, last - first, tuple(merged), note=note.strip())


def _spread(items: Sequence[T], most: int) -> list[T]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def simulated_bars(actor: Actor, times: Times) -> tuple[tuple[TimeBar, ...], ...]:
    return _by_stream(
        (
            instruction.stream.value,
            TimeBar(begin, end, _kind(instruction.op), _name(instruction), _micro_batch(instruction)),
        )
        for instruction, begin, end in zip(actor.program.instructions, times.begin, times.end, strict=True)
        if end > begin
    )


def _measured(events: Sequence[TraceEvent], first: float) -> Iterator[tuple[str, TimeBar]]:
    for event in events:
        begin, end = event.begin - first, event.end - first
        if event.name.startswith("wait "):
            value = event.name.removeprefix("wait ")
            yield "compute", TimeBar(begin, end, "wait", f"wait for {_VALUES.get(value[0], 'value')} {value}")
        elif event.stream != Stream.COMPUTE.value:
            yield event.stream, TimeBar(begin, end, event.stream, event.name)
        else:
            instruction = parse_instruction(event.name, 1)
            if instruction.op is not Op.FREE:
                name = _name(instruction)
                started = "" if instruction.stream is Stream.COMPUTE else "start "
                yield "compute", TimeBar(begin, end, _kind(instruction.op), started + name, _micro_batch(instruction))


def _by_stream(bars: Iterable[tuple[str, TimeBar]]) -> tuple[tuple[TimeBar, ...], ...]:
    by_stream: dict[str, list[TimeBar]] = {stream: [] for stream in STREAMS}
    for stream, bar in bars:
        by_stream[stream].append(bar)
    return tuple(tuple(by_stream[stream]) for stream in STREAMS)


def _kind(op: Op) -> str:
    return "p2p" if op in (Op.SEND, Op.RECEIVE) else "offload" if op is Op.FETCH else op.value


def _micro_batch(instruction: Instruction) -> int:
    if instruction.micro_batch is not None:
        return instruction.micro_batch
    if instruction.op in (Op.SEND, Op.RECEIVE):
        return message_of(instruction).micro_batch
    return -1


def _name(instruction: Instruction) -> str:
    op = instruction.op
    if op in (Op.SEND, Op.RECEIVE):
        # A lane's ranks have different peers, all in one stage.
        message = message_of(instruction)
        what = "hidden state" if message.ahead else "gradient"
        other = "next" if message.ahead is (op is Op.SEND) else "previous"
        return f"{op.value} {what} {'to' if op is Op.SEND else 'from'} the {other} stage"
    return f"{op.value} {instruction.target}".strip()


def _roles(actors: Sequence[Actor]) -> str:
    roles = [role for actor in actors for role in actor.roles]
    if not roles:
        return "only stores state"
    stages = sorted({role.stage for role in roles})
    pipelines = sorted({role.pipeline for role in roles})
    named = "pipeline " + str(pipelines[0]) if len(pipelines) == 1 else f"{len(pipelines)} pipelines"
    return f"{named}, stage {stages[0]}" if len(stages) == 1 else f"{named}, several stages"


def _fewer(lanes: Sequence[TimelineLane], seconds: float) -> tuple[list[TimelineLane], str]:
    if _count(lanes) <= MOST_BARS:
        return list(lanes), ""
    merged = _merged(lanes, merged_blocks)
    if _count(merged) <= MOST_BARS:
        return merged, "Consecutive blocks of a micro-batch are drawn as one bar."
    # Merge longer and longer intervals until few enough bars are left.
    tick = seconds * FINEST
    # Beyond this `tick`, each stream would be a single bar.
    while _count(merged) > MOST_BARS and tick < 2 * seconds:
        merged = _merged(merged, partial(_ticks, tick=tick))
        tick *= 2
    return merged, f"Bars that are closer than {tick / 2 / seconds:.2%} of the iteration are merged into one."


def _count(lanes: Sequence[TimelineLane]) -> int:
    return sum(len(bars) for lane in lanes for bars in lane.bars)


def _merged(lanes: Sequence[TimelineLane], merge: Merge) -> list[TimelineLane]:
    return [TimelineLane(lane.ranks, lane.what, tuple(tuple(merge(bars)) for bars in lane.bars)) for lane in lanes]


def merged_blocks(bars: Sequence[TimeBar]) -> Iterator[TimeBar]:
    for (kind, micro_batch), group in groupby(bars, lambda bar: (bar.kind, bar.micro_batch)):
        for run in runs(group, lambda run, bar: bar.begin > run[-1].end + 1e-3 * (bar.end - bar.begin)):
            yield _one(run, kind, micro_batch)


def _ticks(bars: Sequence[TimeBar], tick: float) -> Iterator[TimeBar]:
    return map(_within_a_tick, runs(bars, lambda run, bar: bar.end - run[0].begin > tick))


def _within_a_tick(run: Sequence[TimeBar]) -> TimeBar:
    seconds: dict[str, float] = {}
    for bar in run:
        seconds[bar.kind] = seconds.get(bar.kind, 0.0) + bar.end - bar.begin
    return _one(run, max(seconds, key=lambda kind: seconds[kind]), -1 if len(run) > 1 else run[0].micro_batch)


def _one(run: Sequence[TimeBar], kind: str, micro_batch: int) -> TimeBar:
    if len(run) == 1:
        return run[0]
    return TimeBar(run[0].begin, run[-1].end, kind, f"{run[0].name} … {run[-1].name}", micro_batch)

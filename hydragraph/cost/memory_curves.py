"""Memory of ranks over a simulated iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from hydragraph.cost.rank_memory import MemoryCurve, MemoryWalk, exchange_name
from hydragraph.cost.timeline import LazySequence, SimulatedSpan, Timeline
from hydragraph.ir.instruction import Op, Stream

# Returns a rank's walk for `over` (see `MemoryWalk`).
WalkOf = Callable[[int, Mapping[int, Sequence[str]]], MemoryWalk]


def memory_curves(timeline: Timeline, walk_of: WalkOf) -> Sequence[MemoryCurve]:
    @cache
    def curve(rank: int) -> MemoryCurve:
        spans = timeline.ranks[rank]
        peak, at, after = walk_of(rank, _ended(spans)).curve()
        points: list[tuple[float, int]] = []
        now = 0.0
        for span, size in zip(spans, after, strict=True):
            now = max(now, span.start_s if span.instruction.op is not Op.FREE else span.end_s)
            if points and points[-1][0] == now:
                points[-1] = (now, size)
            elif not points or points[-1][1] != size:
                points.append((now, size))
        return MemoryCurve(peak, spans[at].start_s if at >= 0 else 0.0, tuple(points))

    return LazySequence(len(timeline.ranks), curve)


def _ended(spans: Sequence[SimulatedSpan]) -> dict[int, list[str]]:
    ended: dict[int, list[str]] = {}
    open_: dict[Op, list[tuple[str, float]]] = {Op.PULL: [], Op.PUSH: []}
    now = 0.0
    for i, span in enumerate(spans):
        instruction = span.instruction
        computes = instruction.op in (Op.FORWARD, Op.BACKWARD)
        if computes:
            now = max(now, span.start_s)
        if computes or instruction.op is Op.PUSH:
            queue = open_[Op.PULL if computes else Op.PUSH]
            while queue and queue[0][1] <= now:
                ended.setdefault(i, []).append(queue.pop(0)[0])
        if instruction.op is Op.PUSH or (instruction.op is Op.PULL and not instruction.writes):
            name = exchange_name(instruction.op, instruction.target)
            open_[instruction.op].append((name, span.end_s))
        if instruction.stream is Stream.COMPUTE:
            now = max(now, span.end_s)
    return ended

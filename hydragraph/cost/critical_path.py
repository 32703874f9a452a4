"""Critical path of a simulated iteration: the instructions that determine its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from hydragraph.cost.actors import Actor
from hydragraph.cost.event_simulation import Times
from hydragraph.ir.instruction import RULES, Instruction, Op, Stream
from hydragraph.ir.value import ValueKind

T = TypeVar("T")

_KINDS = {
    Op.FORWARD: "computing",
    Op.BACKWARD: "computing",
    Op.PULL: "pulling weights",
    Op.PUSH: "pushing gradients",
    Op.SEND: "sending between stages",
    Op.RECEIVE: "sending between stages",
    Op.OFFLOAD: "copying to and from the host",
    Op.FETCH: "copying to and from the host",
    Op.COMMIT: "agreeing",
    Op.UPDATE: "updating",
}
# Maximum printed steps
SHOWN = 12


@dataclass(frozen=True)
class PathStep:
    """Step of the critical path; `kind` is "computing", "pulling weights", ...; times begin at the iteration start."""

    kind: str
    what: str
    begin_s: float
    end_s: float
    ranks: tuple[int, ...]
    op: Op

    @property
    def stream(self) -> Stream:
        return RULES[self.op].stream

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class CriticalPath:
    """Steps in order of time, without gaps."""

    steps: tuple[PathStep, ...] = ()

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of step, largest first."""
        seconds: dict[str, float] = {}
        for step in self.steps:
            seconds[step.kind] = seconds.get(step.kind, 0.0) + step.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def longest(self, count: int) -> list[PathStep]:
        least = sorted((step.seconds for step in self.steps), reverse=True)[:count][-1]
        return [step for step in self.steps if step.seconds >= least][:count]

    def __str__(self) -> str:
        total = sum(step.seconds for step in self.steps)
        if not total:
            return "the critical path is empty: no instruction takes time"
        shares = ", ".join(f"{seconds / total:.0%} {kind}" for kind, seconds in self.by_kind.items() if seconds > 0)
        lines = [f"the critical path of {1e3 * total:.4g} ms: {shares}"]
        for step in self.longest(SHOWN):
            lines.append(f"  {1e3 * step.begin_s:10.3f} ms {1e3 * step.seconds:9.3f} ms  {step.what}")
        if len(self.steps) > SHOWN:
            lines.append(f"  and {len(self.steps) - SHOWN} shorter steps")
        return "\n".join(lines)


def critical_path(actors: Sequence[Actor], times: Sequence[Times]) -> CriticalPath:
    chain = reversed(list(_chain(times)))
    together = runs(chain, lambda run, item: not _together(actors, run[-1], item))
    steps = [_step(actors, times, run) for run in together]
    # A push may still send to second owners during the next.
    ends = [replace(step, end_s=min(step.end_s, after.begin_s)) for step, after in pairwise(steps)]
    return CriticalPath(tuple(step for step in (*ends, *steps[-1:]) if step.seconds > 0))


def runs(items: Iterable[T], ends: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Divide items into runs; `ends` decides whether a run ends before an item."""
    run: list[T] = []
    for item in items:
        if run and ends(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _chain(times: Sequence[Times]) -> Iterator[tuple[int, int]]:
    ends = [(max(own.end), a) for a, own in enumerate(times) if len(own.end)]
    if not ends:
        return
    end, a = max(ends, key=lambda pair: (pair[0], -pair[1]))
    order = range(len(times[a].end))
    i = max((j for j in order if times[a].end[j] == end), key=lambda j: (times[a].actor[j] >= 0, j))
    while i >= 0:
        yield a, i
        a, i = times[a].actor[i], times[a].index[i]


def _together(actors: Sequence[Actor], one: tuple[int, int], two: tuple[int, int]) -> bool:
    first, second = (actors[a].program.instructions[i] for a, i in (one, two))
    return one[0] == two[0] and _KINDS.get(first.op) == _KINDS.get(second.op) and first.op is not Op.RECEIVE


def _step(actors: Sequence[Actor], times: Sequence[Times], run: Sequence[tuple[int, int]]) -> PathStep:
    a, first = run[0]
    b, last = run[-1]
    instructions = [actors[x].program.instructions[i] for x, i in run]
    begin = times[a].begin[first]
    end = times[b].end[last]
    # Slowdowns below 1 % are rounding errors.
    alone = sum(times[x].alone.get(i, 0.0) for x, i in run)
    took = sum(times[x].end[i] - times[x].begin[i] for x, i in run)
    what = _words(actors[a], instructions)
    if alone and took > 1.01 * alone:
        what += f", taking {took / alone:.2f} x as long as alone because it shares links"
    op = instructions[0].op
    return PathStep(_KINDS.get(op, op.value), what, begin, end, actors[a].ranks, op)


def _words(actor: Actor, run: Sequence[Instruction]) -> str:
    op = run[0].op
    where = actor.name
    if actor.roles:
        where = f"{where} ({', '.join(f'pipeline {role.pipeline}, stage {role.stage}' for role in actor.roles)})"
    if op in (Op.FORWARD, Op.BACKWARD):
        forwards = {i.micro_batch for i in run if i.op is Op.FORWARD}
        backwards = {i.micro_batch for i in run if i.op is Op.BACKWARD}
        parts = [
            f"{len(s)} {name}{'s' * (len(s) != 1)}" for s, name in ((forwards, "forward"), (backwards, "backward")) if s
        ]
        spans = " and ".join(f"{first}-{end - 1}" for first, end in actor.layers if end > first)
        layers = f" of layers {spans}" if spans else ""
        return f"{where} computes {' and '.join(parts)}{layers}"
    if op in (Op.PULL, Op.PUSH):
        names = f"{run[0].target}" if len(run) == 1 else f"{len(run)} buckets, {run[0].target} to {run[-1].target}"
        return f"{where} {'pulls' if op is Op.PULL else 'pushes'} {names}"
    if op is Op.SEND:
        what = "hidden states" if run[0].reads[0].kind is ValueKind.ACTIVATION else "gradients"
        return f"{where} sends {what} of {len(run)} micro-batch{'es' * (len(run) != 1)} to another stage"
    if op in (Op.OFFLOAD, Op.FETCH):
        names = run[0].target if len(run) == 1 else f"{len(run)} blocks, {run[0].target} to {run[-1].target}"
        return f"{where} copies activations of {names}"
    return f"{where}: {op.value}"

"""Breakdown of a rank's time by kind of work, for a traced or simulated iteration.

A wait for a message counts as `LATE` until every rank in the transfer has started it, and as transfer time afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hydragraph.cost.timeline import Timeline
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.ir.instruction import RULES, Instruction, Op, Stream
from hydragraph.ir.instruction_text import parse_instruction
from hydragraph.ir.value import ValueKind, gradients, parse_value, weights


class TimeKind(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    # Starts of pulls, and waits
    PULL = "pull"
    PUSH = "push"
    P2P = "send/receive"
    # Starts of copies to or from the host, and waits
    OFFLOAD = "offload"
    UPDATE = "update"
    COMMIT = "commit"
    # Waits for ranks that have not yet sent a message or reached the commit
    LATE = "waiting for ranks"
    OTHER = "between instructions"


CAUSES = tuple(kind for kind in TimeKind if kind is not TimeKind.LATE)
TRANSFERS = (TimeKind.PULL, TimeKind.PUSH, TimeKind.P2P)

# Kinds are named like streams or, for the compute stream, operations.
_OF_OP = {Op.FREE: TimeKind.OTHER} | {
    op: TimeKind[(op if rule.stream is Stream.COMPUTE else rule.stream).name]
    for op, rule in RULES.items()
    if op is not Op.FREE
}
_OF_KIND = {
    ValueKind.WEIGHTS: TimeKind.PULL,
    ValueKind.GRADIENTS: TimeKind.PUSH,
    ValueKind.COPYING: TimeKind.OFFLOAD,
    ValueKind.FETCHED: TimeKind.OFFLOAD,
}


@dataclass(frozen=True)
class TimeAccount:
    """Time of one rank in an iteration, by kind of work.

    Attributes:
        transfers: seconds of each message after its last participant starts; in traces, only of messages that the rank
            waited for.
    """

    seconds: dict[TimeKind, float] = field(default_factory=lambda: dict.fromkeys(TimeKind, 0.0))
    transfers: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def add_wait(self, kind: TimeKind, begin: float, end: float, issued: float) -> None:
        late = min(max(issued - begin, 0.0), end - begin)
        self.seconds[TimeKind.LATE] += late
        self.seconds[kind] += end - begin - late


def measured_accounts(ranks: Sequence[Sequence[TraceEvent]]) -> tuple[TimeAccount, ...]:
    """Return every rank's account of a traced iteration; clocks that differ between hosts shift time between `LATE` and
    transfers.
    """
    issued = _issued(ranks)
    measured = [_measured(rank, events, issued) for rank, events in enumerate(ranks)]
    # The last rank at the commit does not wait.
    own = min((commit for _, commit in measured), default=0.0)
    for account, commit in measured:
        account.seconds[TimeKind.COMMIT] += own
        account.seconds[TimeKind.LATE] += commit - own
    return tuple(account for account, _ in measured)


def _issued(ranks: Sequence[Sequence[TraceEvent]]) -> dict[str, float]:
    began: dict[str, float] = {}
    for events in ranks:
        for event in events:
            if event.stream != Stream.COMPUTE.value:
                began[event.name] = max(event.begin, began.get(event.name, event.begin))
    return began


def _measured(rank: int, events: Sequence[TraceEvent], issued: Mapping[str, float]) -> tuple[TimeAccount, float]:
    computing = sorted((e for e in events if e.stream == Stream.COMPUTE.value), key=lambda e: (e.begin, -e.end))
    sums = TimeAccount()
    commit = 0.0
    for event, own in _own(computing):
        if event.name.startswith("wait "):
            value = parse_value(event.name.removeprefix("wait "))
            # Events of activations name receivers (`h2.0>3`).
            to_rank = value.kind in (ValueKind.ACTIVATION, ValueKind.ACTIVATION_GRADIENT)
            since = issued.get(f"{value}>{rank}" if to_rank else value)
            kind = _OF_KIND.get(value.kind, TimeKind.P2P)
            sums.add_wait(kind, event.begin, event.end, event.begin if since is None else since)
            if since is not None and event.end > max(event.begin, since):
                sums.transfers[value] = event.end - since
            continue
        kind = _OF_OP[parse_instruction(event.name, 0).op]
        if kind is TimeKind.COMMIT:
            commit += own
        else:
            sums.seconds[kind] += own
    if computing:
        whole = max(event.end for event in computing) - computing[0].begin
        sums.seconds[TimeKind.OTHER] += max(0.0, whole - commit - sum(sums.seconds.values()))
    return sums, commit


def _own(events: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, float]]:
    open_: list[tuple[TraceEvent, float]] = []
    for event in events:
        while open_ and open_[-1][0].end <= event.begin:
            yield _closed(open_)
        if open_:
            outer, inside = open_[-1]
            open_[-1] = outer, inside + event.end - event.begin
        open_.append((event, 0.0))
    while open_:
        yield _closed(open_)


def _closed(open_: list[tuple[TraceEvent, float]]) -> tuple[TraceEvent, float]:
    event, inside = open_.pop()
    return event, max(0.0, event.end - event.begin - inside)


def predicted_accounts(timeline: Timeline) -> tuple[TimeAccount, ...]:
    issued = _simulated_issues(timeline)
    accounts = [_predicted(timeline, a, issued) for a in range(len(timeline.actors))]
    return tuple(accounts[timeline.actor_of[rank]] for rank in range(len(timeline.actor_of)))


Issues = Mapping[tuple[Op, str], float]


def _simulated_issues(timeline: Timeline) -> Issues:
    issues: dict[tuple[Op, str], float] = {}
    for a, actor in enumerate(timeline.actors):
        for i in (*actor.program.pulls, *actor.program.pushes):
            instruction = actor.program.instructions[i]
            key = instruction.op, instruction.target
            issues[key] = max(issues.get(key, 0.0), _ready(timeline, a, i))
    return issues


def _ready(timeline: Timeline, a: int, i: int) -> float:
    end = timeline.times[a].end
    return max((end[need] for need in timeline.actors[a].program.needs[i]), default=0.0)


def _predicted(timeline: Timeline, a: int, issues: Issues) -> TimeAccount:
    program = timeline.actors[a].program
    times = timeline.times[a]
    sums = TimeAccount()
    free = 0.0
    for i in program.compute:
        instruction = program.instructions[i]
        for j in _awaited(timeline, a, i):
            if times.end[j] > free:
                kind = _OF_OP[program.instructions[j].op]
                sums.add_wait(kind, free, times.end[j], _issue(timeline, a, j, issues))
                free = times.end[j]
        sums.seconds[TimeKind.LATE] += max(0.0, times.begin[i] - free)
        sums.seconds[_OF_OP[instruction.op]] += times.end[i] - times.begin[i]
        free = max(free, times.end[i])
    for j in (*program.pulls, *program.pushes, *program.receives):
        sums.transfers[_value(program.instructions[j])] = times.end[j] - _issue(timeline, a, j, issues)
    return sums


def _value(transfer: Instruction) -> str:
    if transfer.op is Op.RECEIVE:
        return transfer.writes[0]
    return weights(transfer.target) if transfer.op is Op.PULL else gradients(transfer.target)


def _awaited(timeline: Timeline, a: int, i: int) -> Iterable[int]:
    program = timeline.actors[a].program
    if program.instructions[i].op is not Op.COMMIT:
        return program.needs[i]
    end = timeline.times[a].end
    transfers = (*program.pulls, *program.pushes, *program.sends, *program.receives)
    return sorted(transfers, key=lambda j: end[j])


def _issue(timeline: Timeline, a: int, j: int, issues: Issues) -> float:
    instruction = timeline.actors[a].program.instructions[j]
    if instruction.op is not Op.RECEIVE:
        return issues.get((instruction.op, instruction.target), 0.0)
    times = timeline.times[a]
    sender = times.actor[j]
    return _ready(timeline, sender, times.index[j]) if sender >= 0 else 0.0

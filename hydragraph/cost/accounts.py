"""Accounts: how one rank spent the seconds of an iteration, for a traced run and for a simulation alike.

Every second belongs to one kind. A wait for a message is split at the time when the other side started it: before that,
the other rank was late (`LATE`); after that, the transfer counts. An error of the cost model thus shows where it is
made, and not on the ranks that wait because of it.

Example: rank 1 needs h2.0 from rank 0 at 3 s, rank 0 sends it at 5 s, and it arrives at 6 s.

    LATE     3 to 5   rank 0 was still computing
    P2P      5 to 6   the message
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hydragraph.cost.timeline import Timeline
from hydragraph.cost.trace_file import Event
from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.instruction_text import parse_instruction
from hydragraph.ir.value import Value, ValueKind, gradients, parse_value, weights


class Kind(Enum):
    """Kinds of time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PULL = "pull"  # starting it, and waiting for it in flight; likewise PUSH and P2P
    PUSH = "push"
    P2P = "send/receive"
    UPDATE = "update"
    COMMIT = "commit"
    LATE = "waiting for ranks"  # that had not yet sent, or had not reached the commit
    OTHER = "between instructions"


# The kinds of a rank's own time; it waits for other ranks because of theirs.
CAUSES = tuple(kind for kind in Kind if kind is not Kind.LATE)

_OF_OP = {
    Op.FORWARD: Kind.FORWARD,
    Op.BACKWARD: Kind.BACKWARD,
    Op.PULL: Kind.PULL,
    Op.PUSH: Kind.PUSH,
    Op.SEND: Kind.P2P,
    Op.RECEIVE: Kind.P2P,
    Op.UPDATE: Kind.UPDATE,
    Op.COMMIT: Kind.COMMIT,
    Op.FREE: Kind.OTHER,
}
_OF_STREAM = {Stream.PULL: Kind.PULL, Stream.PUSH: Kind.PUSH, Stream.P2P: Kind.P2P}


@dataclass(frozen=True)
class Account:
    """How one rank spent an iteration.

    Attributes:
        seconds: by kind; their sum is the rank's iteration.
        transfers: by message, seconds since the last of its participants started it. A traced run has only messages
            that a rank waited for in flight, since the other arrivals were not recorded.
    """

    seconds: Mapping[Kind, float]
    transfers: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds from the rank's first instruction to the end of its last."""
        return sum(self.seconds.values())


class _Sums:
    """An account under construction."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Kind, 0.0)
        self.transfers: dict[str, float] = {}

    def wait(self, kind: Kind, begin: float, end: float, issued: float) -> None:
        """Add a wait for a message that its last sender issued at `issued`."""
        late = min(max(issued - begin, 0.0), end - begin)
        self.seconds[Kind.LATE] += late
        self.seconds[kind] += end - begin - late

    def account(self) -> Account:
        return Account(self.seconds, self.transfers)


# Traced runs.


def measured_accounts(ranks: Sequence[Sequence[Event]]) -> tuple[Account, ...]:
    """Return every rank's account of one traced iteration.

    If clocks of hosts differ, the same amount of each wait is attributed to the transfer instead of the late rank, or
    vice versa.

    Args:
        ranks: by rank, the events of that iteration alone.

    Raises:
        ValueError: a name in the trace is not an instruction.
    """
    issued = _issued(ranks)
    sums = []
    commits = []
    for rank, events in enumerate(ranks):
        found, commit = _measured(rank, events, issued)
        sums.append(found)
        commits.append(commit)
    # The last rank at the commit does not wait: its time there is the cost of the commit.
    own = min(commits, default=0.0)
    for found, commit in zip(sums, commits, strict=True):
        found.seconds[Kind.COMMIT] += own
        found.seconds[Kind.LATE] += commit - own
    return tuple(found.account() for found in sums)


def _issued(ranks: Sequence[Sequence[Event]]) -> Callable[[Value, int], float]:
    """Return a function for the time when the last participant started exchanging a value, for a waiting rank."""
    began: dict[str, float] = {}
    for events in ranks:
        for event in events:
            if event.stream != Stream.COMPUTE.value:
                began[event.name] = max(event.begin, began.get(event.name, event.begin))

    def of(value: Value, rank: int) -> float:
        # The sender identifies an activation by its receiver.
        name = f"{value}>{rank}" if value.kind in (ValueKind.ACTIVATION, ValueKind.ACTIVATION_GRADIENT) else value
        return began.get(name, float("-inf"))

    return of


def _measured(rank: int, events: Sequence[Event], issued: Callable[[Value, int], float]) -> tuple[_Sums, float]:
    """Return a rank's sums, and the seconds of its commit, including its wait for other ranks."""
    computing = sorted((e for e in events if e.stream == Stream.COMPUTE.value), key=lambda e: (e.begin, -e.end))
    sums = _Sums()
    commit = 0.0
    for event, own in _own(computing):
        if event.name.startswith("wait "):
            value = parse_value(event.name.removeprefix("wait "))
            kind = _OF_STREAM[_stream_of(value)]
            since = issued(value, rank)
            # If no start was recorded, the whole wait counts as the transfer.
            known = since > float("-inf")
            sums.wait(kind, event.begin, event.end, since if known else event.begin)
            if known and event.end > max(event.begin, since):
                sums.transfers[value] = event.end - since
            continue
        kind = _OF_OP[parse_instruction(event.name, 0).op]
        if kind is Kind.COMMIT:
            commit += own
        else:
            sums.seconds[kind] += own
    if computing:
        whole = max(event.end for event in computing) - computing[0].begin
        sums.seconds[Kind.OTHER] += max(0.0, whole - commit - sum(sums.seconds.values()))
    return sums, commit


def _own(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield events, sorted by start, with their seconds without those of nested events."""
    open_: list[tuple[Event, float]] = []  # with the seconds of nested events
    for event in events:
        while open_ and open_[-1][0].end <= event.begin:
            yield _closed(open_)
        if open_:
            outer, inside = open_[-1]
            open_[-1] = outer, inside + event.end - event.begin
        open_.append((event, 0.0))
    while open_:
        yield _closed(open_)


def _closed(open_: list[tuple[Event, float]]) -> tuple[Event, float]:
    event, inside = open_.pop()
    return event, max(0.0, event.end - event.begin - inside)


def _stream_of(value: Value) -> Stream:
    return {ValueKind.WEIGHTS: Stream.PULL, ValueKind.GRADIENTS: Stream.PUSH}.get(value.kind, Stream.P2P)


# Simulations.


def predicted_accounts(timeline: Timeline) -> tuple[Account, ...]:
    """Return every rank's account of a simulated iteration; ranks of a stage have the same one."""
    issued = _simulated_issues(timeline)
    accounts = [_predicted(timeline, a, issued) for a in range(len(timeline.actors))]
    return tuple(accounts[timeline.actor_of[rank]] for rank in range(len(timeline.actor_of)))


Issues = Mapping[tuple[Op, str], float]  # for each exchange, when the last rank has made its data


def _simulated_issues(timeline: Timeline) -> Issues:
    issues: dict[tuple[Op, str], float] = {}
    for a, actor in enumerate(timeline.actors):
        for i in (*actor.program.pulls, *actor.program.pushes):
            instruction = actor.program.instructions[i]
            key = instruction.op, instruction.target
            issues[key] = max(issues.get(key, 0.0), _ready(timeline, a, i))
    return issues


def _ready(timeline: Timeline, a: int, i: int) -> float:
    """Return when the inputs of an instruction were ready."""
    end = timeline.times[a].end
    return max((end[need] for need in timeline.actors[a].program.needs[i]), default=0.0)


def _predicted(timeline: Timeline, a: int, issues: Issues) -> Account:
    program = timeline.actors[a].program
    times = timeline.times[a]
    sums = _Sums()
    free = 0.0  # when computation could continue
    for i in program.compute:
        instruction = program.instructions[i]
        for j in _awaited(timeline, a, i):
            if times.end[j] > free:
                kind = _OF_OP[program.instructions[j].op]
                sums.wait(kind, free, times.end[j], _issue(timeline, a, j, issues))
                free = times.end[j]
        sums.seconds[Kind.LATE] += max(0.0, times.begin[i] - free)
        sums.seconds[_OF_OP[instruction.op]] += times.end[i] - times.begin[i]
        free = max(free, times.end[i])
    for j in (*program.pulls, *program.pushes, *program.receives):
        sums.transfers[_value(program.instructions[j])] = times.end[j] - _issue(timeline, a, j, issues)
    return sums.account()


def _value(transfer: Instruction) -> str:
    """Return the value that a pull, a push or a receive brings."""
    if transfer.op is Op.RECEIVE:
        return transfer.writes[0]
    return weights(transfer.target) if transfer.op is Op.PULL else gradients(transfer.target)


def _awaited(timeline: Timeline, a: int, i: int) -> Iterable[int]:
    """Return the transfers that a computation waits for: for a commit, all of them, ordered by their ends."""
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

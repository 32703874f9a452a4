"""Simulation of when actors' instructions begin and end.

Transfers end in order of time (`cost.shared_ports`). A computation is timed once the ends of its inputs are known, even
if these are in the simulated future.

    a, b    actors, by number (`cost.actors`)
    i       an instruction of an actor's program
    queue   pulls, pushes, sends, copies (to or from the host) or computations: one at a time, in the program's order
    hand    queue of pushed sums from first to second owners; later pushes do not wait for it
    ready   when an instruction can begin
    cause   the instruction that another instruction waited for last

Example: two stages of one rank each, and one micro-batch. A forward takes 1 s, a backward 2 s, and a message 0.5 s.

    stage 0  computes forward 0-1;  sends 1-1.5;                                    computes backward 5-7
    stage 1                         computes forward 1.5-2.5 and backward 2.5-4.5;  sends 4.5-5
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hydragraph.cost.actors import Actor, message_of
from hydragraph.cost.instruction_work import SHARES, InstructionCosts
from hydragraph.cost.shared_ports import Flow, Flows, Used
from hydragraph.cost.traffic import ExchangeTimes, RankLinks
from hydragraph.ir.instruction import Op
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.spec.cluster import Cluster

UNKNOWN = -1.0
_PULL, _PUSH, _SEND, _HAND, _COPY = range(5)
_QUEUES = {Op.PULL: _PULL, Op.PUSH: _PUSH, Op.SEND: _SEND, Op.OFFLOAD: _COPY, Op.FETCH: _COPY}


@dataclass(frozen=True, eq=False)
class Times:
    """Start and end times of an actor's instructions, in seconds; FREE has none.

    Attributes:
        actor, index: actor and index of the instruction that each instruction waited for last (its cause); -1: none.
        alone: seconds that each transfer would take without other traffic.
    """

    begin: array[float]
    end: array[float]
    actor: array[int]
    index: array[int]
    alone: dict[int, float]


@dataclass(eq=False)
class _Meeting:
    passage: ExchangeTimes
    left: np.ndarray
    latest: np.ndarray
    last: np.ndarray
    # for each actor: instruction, arrival time and cause
    entered: dict[int, tuple[int, float, tuple[int, int]]]


@dataclass(eq=False, slots=True)
class _EventQueue:
    """Transfers of an actor that run one at a time. `next` is the position of the first one that has not begun.

    Attributes:
        free: end of the previous transfer, or UNKNOWN while it runs.
        before: previous transfer, or -1.
    """

    transfers: tuple[int, ...]
    next: int = 0
    free: float = 0.0
    before: int = -1


class _Progress:
    """Progress of one actor.

    Attributes:
        at: position in the queue of computations.
        clock, latest: end and index of the previous computation.
        summed: time when first owners have the sums, by push.
        open: number of unfinished transfers.
        other: end and index of the transfer that ended last.
    """

    def __init__(self, number: int, actor: Actor, work: InstructionCosts) -> None:
        program = actor.program
        n = len(program.instructions)
        self.number = number
        self.actor = actor
        self.program = program
        none = array("i", [-1]) * n
        self.times = Times(array("d", [0.0]) * n, array("d", [UNKNOWN]) * n, none, none[:], {})
        self.durations = _durations(actor, work)
        self.arriving = {message_of(program.instructions[i]): i for i in program.receives}
        self.at = 0
        self.clock = 0.0
        self.latest = -1
        # These pushes are in two queues: first to first owners, then, as sums, to second owners.
        handed_on = tuple(i for i in program.pushes if len(work.handed_on(program.instructions[i].target)))
        transfers = (program.pulls, program.pushes, program.sends, handed_on, program.copies)
        self.queues = [_EventQueue(each) for each in transfers]
        self.handed_on = frozenset(handed_on)
        self.summed: dict[int, float] = {}
        # A push counts as one open transfer, even if it is handed on.
        self.open = sum(map(len, transfers)) - len(handed_on) + len(program.receives)
        self.other = (0.0, -1)


class EventSimulation:
    def __init__(self, actors: Sequence[Actor], cluster: Cluster, work: InstructionCosts) -> None:
        self._work = work
        group = np.zeros(len(cluster.devices), dtype=np.int64)
        for a, actor in enumerate(actors):
            group[list(actor.ranks)] = a
        handling = np.array([work.handling(rank) for rank in range(len(cluster.devices))])
        self._roads = RankLinks(cluster, group, handling)
        self._passage = cache(self._roads.passage)
        self._flows = Flows()
        self._group = group.tolist()
        self._actors = [_Progress(a, actor, work) for a, actor in enumerate(actors)]
        self._meeting = cache(self._new_meeting)
        self._committing: dict[int, tuple[float, int, int, int]] = {}
        self._dirty = deque(self._actors)

    def run(self) -> list[Times]:
        """Return every actor's times; raise a ValueError if the programs never end."""
        self._settle()
        for now, flow in self._flows.ended():
            self._finish(self._actors[flow.actor], flow.index, now)
            self._settle()
        for actor in self._actors:
            if actor.at < len(actor.program.compute) or actor.open:
                raise ValueError(_stuck(actor))
        return [actor.times for actor in self._actors]

    def _settle(self) -> None:
        while self._dirty:
            actor = self._dirty.popleft()
            self._compute(actor)
            for queue in (_PULL, _PUSH, _SEND, _HAND, _COPY):
                self._transfer(actor, queue)

    def _compute(self, own: _Progress) -> None:
        queue = own.program.compute
        needs = own.program.needs
        times = own.times
        begin = times.begin
        end = times.end
        while own.at < len(queue):
            i = queue[own.at]
            ready = own.clock
            cause = own.latest
            # Begin when the previous computation and all inputs have ended; the last is the cause.
            for need in needs[i]:
                made_at = end[need]
                if made_at < 0:
                    return
                if made_at > ready:
                    ready = made_at
                    cause = need
            seconds = own.durations[i]
            # A negative duration marks a commit, which waits for all actors.
            if seconds < 0:
                if not self._commit(own, i, ready, cause):
                    return
                continue
            begin[i] = ready
            own.clock = end[i] = ready + seconds
            times.actor[i], times.index[i] = (own.number, cause) if cause >= 0 else (-1, -1)
            own.latest = i
            own.at += 1

    def _commit(self, own: _Progress, i: int, ready: float, cause: int) -> bool:
        if own.open or own.number in self._committing:
            return False
        other, index = own.other
        if other > ready:
            ready = other
            cause = index
        self._committing[own.number] = (ready, i, own.number, cause)
        # The last arrival ends the wait.
        if len(self._committing) < len(self._actors):
            return False
        last = max(self._committing.values(), key=lambda arrival: arrival[0])
        over = last[0] + self._work.commit_s()
        for b, (_, j, _, _) in self._committing.items():
            peer = self._actors[b]
            times = peer.times
            times.begin[j] = last[0]
            times.end[j] = over
            times.actor[j], times.index[j] = (last[2], last[3]) if last[3] >= 0 else (-1, -1)
            peer.at += 1
            peer.clock = over
            peer.latest = j
            if peer is not own:
                self._dirty.append(peer)
        return True

    def _transfer(self, own: _Progress, kind: int) -> None:
        queue = own.queues[kind]
        while queue.next < len(queue.transfers) and queue.free >= 0:
            i = queue.transfers[queue.next]
            ready = queue.free
            cause = queue.before
            if kind == _HAND:
                if i not in own.summed:
                    return
                ready = max(ready, own.summed[i])
                cause = i
            else:
                end = own.times.end
                for need in own.program.needs[i]:
                    if end[need] < 0:
                        return
                    if end[need] > ready:
                        ready = end[need]
                        cause = need
            queue.free = UNKNOWN
            queue.next += 1
            if kind == _SEND:
                self._send(own, i, ready, cause)
            elif kind == _COPY:
                copy = own.program.instructions[i]
                seconds = self._work.copying(copy.target, own.actor.ranks, copy.batch)
                self._begin(own, i, ready, (own.number, cause), seconds, ())
            else:
                self._enter(own, i, ready, cause, kind)

    def _send(self, own: _Progress, i: int, ready: float, cause: int) -> None:
        message, _ = own.program.messages[i]
        role = own.actor.role_of[message.micro_batch]
        size = self._work.message_bytes(role.pipeline, message.micro_batch - role.micro_batches.start)
        seconds, used = self._roads.message(own.actor.pairs(i), size) if size is not None else (0.0, ())
        self._begin(own, i, ready, (own.number, cause), seconds, used)

    def _begin(self, own: _Progress, i: int, ready: float, cause: tuple[int, int], seconds: float, used: Used) -> None:
        times = own.times
        # Time between the halves of a push counts as transfer
        if i in own.summed:
            times.alone[i] += ready - own.summed[i] + seconds
        else:
            times.begin[i] = ready
            times.alone[i] = seconds
            times.actor[i], times.index[i] = cause if cause[1] >= 0 else (-1, -1)
        self._flows.begin(ready, Flow(own.number, i, seconds, used))

    def _enter(self, own: _Progress, i: int, ready: float, cause: int, queue: int) -> None:
        meeting = self._meeting(queue, own.program.instructions[i].target)
        a = own.number
        row = meeting.passage.partners[a]
        if not row[a]:
            self._begin(own, i, ready, (a, cause), 0.0, ())
            return
        meeting.entered[a] = (i, ready, (a, cause))
        if meeting.passage.whole:
            count = len(self._actors)
            if len(meeting.entered) == count:
                # Among equally late actors, the first
                last = max(meeting.entered, key=lambda b: meeting.entered[b][1])
                self._begin_together(meeting, range(count), [last] * count)
            return
        later = row & (meeting.latest < ready)
        meeting.latest[later] = ready
        meeting.last[later] = a
        meeting.left[row] -= 1
        there = np.flatnonzero(row & (meeting.left == 0))
        self._begin_together(meeting, there.tolist(), meeting.last[there].tolist())

    def _begin_together(self, meeting: _Meeting, actors: Sequence[int], lasts: Sequence[int]) -> None:
        passage = meeting.passage
        for b, last in zip(actors, lasts, strict=True):
            i = meeting.entered[b][0]
            _, ready, cause = meeting.entered[last]
            self._begin(self._actors[b], i, ready, cause, float(passage.seconds[b]), passage.occupied[b])

    def _new_meeting(self, queue: int, bucket: str) -> _Meeting:
        op = Op.PULL if queue == _PULL else Op.PUSH
        passage = self._passage(self._work.handed_on(bucket) if queue == _HAND else self._work.moved(op, bucket))
        count = len(self._actors)
        return _Meeting(passage, passage.partners.sum(1), np.full(count, -1.0), np.full(count, -1), {})

    def _finish(self, own: _Progress, i: int, now: float) -> None:
        op = own.program.instructions[i].op
        first_half = i in own.handed_on and i not in own.summed
        queue = own.queues[_HAND if i in own.summed else _QUEUES[op]]
        queue.free = now
        queue.before = i
        if first_half:
            own.summed[i] = now
            self._dirty.append(own)
            return
        own.times.end[i] = now
        self._close(own, i, now)
        if op is Op.SEND:
            self._arrive(own, i, now)

    def _close(self, own: _Progress, i: int, now: float) -> None:
        own.open -= 1
        if now >= own.other[0]:
            own.other = now, i
        self._dirty.append(own)

    def _arrive(self, own: _Progress, i: int, now: float) -> None:
        message, turn = own.program.messages[i]
        target = own.actor.receivers[message]
        if (turn + 1) * len(own.actor.ranks) < len(target):
            return
        receiver = self._actors[self._group[target[0]]]
        index = receiver.arriving.get(message)
        if index is None:
            return
        times = receiver.times
        times.begin[index] = times.end[index] = now
        times.actor[index] = own.number
        times.index[index] = i
        self._close(receiver, index, now)


def _stuck(own: _Progress) -> str:
    program = own.program
    if own.at < len(program.compute):
        at = program.compute[own.at]
    else:
        ends = zip(program.instructions, own.times.end, strict=True)
        at = next(i for i, (instruction, end) in enumerate(ends) if end < 0 and instruction.op is not Op.FREE)
    where = " ".join(instruction_text(program.instructions[at]).split())
    return (
        f"rank {own.actor.ranks[0]} never ends, because its instruction {at}, {where!r}, never begins: pass these "
        "programs to verify(), which names the waiting ranks"
    )


def _durations(actor: Actor, work: InstructionCosts) -> list[float]:
    program = actor.program
    durations = [0.0] * len(program.instructions)
    tables: dict[tuple[Op, str], dict[int, float]] = {}
    numbers = tuple(actor.role_of)
    for i in program.compute:
        instruction = program.instructions[i]
        op = instruction.op
        if op is Op.FORWARD or op is Op.BACKWARD:
            table = tables.get((op, instruction.target))
            if table is None:
                seconds = work.computing(op, instruction.target, actor.ranks, numbers)
                table = tables[op, instruction.target] = dict(zip(numbers, seconds, strict=True))
            durations[i] = table[instruction.batch] * SHARES.get(instruction.work, 1.0)
        elif op is Op.COMMIT:
            durations[i] = -1.0
        elif op is Op.UPDATE:
            durations[i] = max(work.update_s(rank) for rank in actor.ranks)
    return durations

"""Event simulation of each actor's instructions: when they begin and end.

The clock is the end time of the last transfer (`cost.shared_ports`). A computation is timed as soon as the ends
of its inputs are known, even if they are later than the clock. No event begins earlier than the clock.

    a, b    actors, by number (`cost.actors`)
    i       an instruction of an actor's program
    queue   pulls, pushes, sends, copies (to or from the host) or computations: one at a time, in the program's order
    hand    queue for the second half of a push, from first to second owners; the next push does not wait for it
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

from hydragraph.cost.actors import Actor, StageMessage, message_of
from hydragraph.cost.instruction_work import SHARES, Priced
from hydragraph.cost.shared_ports import Flow, Flows
from hydragraph.cost.traffic import Passage, Roads
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
        actor, index: actor and index of the instruction that each instruction waited for last; -1: none.
        alone: seconds that each transfer would take without other traffic.
    """

    begin: array[float]
    end: array[float]
    actor: array[int]
    index: array[int]
    alone: dict[int, float]


@dataclass(eq=False)
class _Meeting:
    passage: Passage
    left: np.ndarray
    latest: np.ndarray
    last: np.ndarray
    # actor -> (instruction, arrival time, cause)
    entered: dict[int, tuple[int, float, tuple[int, int]]]


class Engine:
    def __init__(self, actors: Sequence[Actor], cluster: Cluster, work: Priced) -> None:
        self.actors = actors
        self._work = work
        group = np.zeros(len(cluster.devices), dtype=np.int64)
        for a, actor in enumerate(actors):
            group[list(actor.ranks)] = a
        handling = np.array([work.handling(rank) for rank in range(len(cluster.devices))])
        self._roads = Roads(cluster, group, handling)
        self._flows = Flows()
        self._group = group.tolist()
        self._passage = cache(self._roads.passage)
        sizes = [len(actor.program.instructions) for actor in actors]
        self.times = [
            Times(array("d", [0.0]) * n, array("d", [UNKNOWN]) * n, array("i", [-1]) * n, array("i", [-1]) * n, {})
            for n in sizes
        ]
        self._durations = [_durations(actor, work) for actor in actors]
        self._arriving = [_receives(actor) for actor in actors]
        self._meetings: dict[tuple[int, str], _Meeting] = {}
        self._summed: list[dict[int, float]] = [{} for _ in actors]  # push -> when second owners can receive its sums
        self._at = [0] * len(actors)
        self._clock = [0.0] * len(actors)
        self._latest = [-1] * len(actors)
        self._queues = [
            (
                p.pulls,
                p.pushes,
                p.sends,
                tuple(i for i in p.pushes if len(work.handed_on(p.instructions[i].target))),
                p.copies,
            )
            for p in (actor.program for actor in actors)
        ]
        self._handed_on = [frozenset(queues[_HAND]) for queues in self._queues]
        self._next = [[0] * 5 for _ in actors]
        self._free: list[list[float]] = [[0.0] * 5 for _ in actors]  # UNKNOWN while a transfer is in flight
        self._before = [[-1] * 5 for _ in actors]
        self._open = [
            sum(map(len, (p.pulls, p.pushes, p.sends, p.receives, p.copies))) for p in (a.program for a in actors)
        ]
        self._other: list[tuple[float, int]] = [(0.0, -1)] * len(actors)  # (end, index) of the transfer that ended last
        self._committing: dict[int, tuple[float, int, int, int]] = {}
        self._committers = sum(
            any(a.program.instructions[i].op is Op.COMMIT for i in a.program.compute) for a in actors
        )
        self._dirty: deque[int] = deque()

    def run(self) -> list[Times]:
        """Return the times of every actor.

        Raises:
            ValueError: the programs never end.
        """
        self._dirty.extend(range(len(self.actors)))
        self._settle()
        for now, flow in self._flows.ended():
            self._finish(flow.actor, flow.index, now)
            self._settle()
        for a, actor in enumerate(self.actors):
            if self._at[a] < len(actor.program.compute) or self._open[a]:
                raise ValueError(self._stuck(a, actor))
        return self.times

    def _stuck(self, a: int, actor: Actor) -> str:
        program = actor.program
        at = program.compute[self._at[a]] if self._at[a] < len(program.compute) else None
        if at is None:
            ends = zip(program.instructions, self.times[a].end, strict=True)
            at = next(i for i, (instruction, end) in enumerate(ends) if end < 0 and instruction.op is not Op.FREE)
        where = " ".join(instruction_text(program.instructions[at]).split())
        return (
            f"rank {actor.ranks[0]} never ends, because its instruction {at}, {where!r}, never begins: pass these "
            "programs to verify(), which names the waiting ranks"
        )

    def _settle(self) -> None:
        while self._dirty:
            a = self._dirty.popleft()
            self._compute(a)
            for queue in (_PULL, _PUSH, _SEND, _HAND, _COPY):
                self._transfer(a, queue)

    def _compute(self, a: int) -> None:
        program = self.actors[a].program
        times = self.times[a]
        durations = self._durations[a]
        queue = program.compute
        needs = program.needs
        begin = times.begin
        end = times.end
        by_actor = times.actor
        by_index = times.index
        at = self._at[a]
        clock = self._clock[a]
        latest = self._latest[a]
        while at < len(queue):
            i = queue[at]
            ready = clock
            cause = latest
            for need in needs[i]:
                made_at = end[need]
                if made_at < 0:
                    ready = UNKNOWN
                    break
                if made_at > ready:
                    ready = made_at
                    cause = need
            if ready < 0:
                break
            seconds = durations[i]
            if seconds < 0:
                if not self._commit(a, i, ready, cause):
                    break
                at = self._at[a]
                clock = self._clock[a]
                latest = self._latest[a]
                continue
            begin[i] = ready
            clock = end[i] = ready + seconds
            by_actor[i], by_index[i] = (a, cause) if cause >= 0 else (-1, -1)
            latest = i
            at += 1
        self._at[a] = at
        self._clock[a] = clock
        self._latest[a] = latest

    def _commit(self, a: int, i: int, ready: float, cause: int) -> bool:
        if self._open[a] or a in self._committing:
            return False
        other, index = self._other[a]
        if other > ready:
            ready = other
            cause = index
        self._committing[a] = (ready, i, a, cause)
        if len(self._committing) < self._committers:
            return False
        last = max(self._committing.values(), key=lambda arrival: arrival[0])
        over = last[0] + self._work.commit_s()
        for b, (_, j, _, _) in self._committing.items():
            times = self.times[b]
            times.begin[j] = last[0]
            times.end[j] = over
            times.actor[j], times.index[j] = (last[2], last[3]) if last[3] >= 0 else (-1, -1)
            self._at[b] += 1 if b != a else 0
            self._clock[b] = over
            self._latest[b] = j
            if b != a:
                self._dirty.append(b)
        self._at[a] = self.actors[a].program.compute.index(i) + 1
        return True

    def _transfer(self, a: int, queue: int) -> None:
        while self._next[a][queue] < len(self._queues[a][queue]) and self._free[a][queue] >= 0:
            i = self._queues[a][queue][self._next[a][queue]]
            ready = self._free[a][queue]
            cause = self._before[a][queue]
            if queue == _HAND:
                if i not in self._summed[a]:
                    return
                self._free[a][queue] = UNKNOWN
                self._next[a][queue] += 1
                self._enter(a, i, max(ready, self._summed[a][i]), i, queue)
                continue
            end = self.times[a].end
            for need in self.actors[a].program.needs[i]:
                if end[need] < 0:
                    return
                if end[need] > ready:
                    ready = end[need]
                    cause = need
            self._free[a][queue] = UNKNOWN
            self._next[a][queue] += 1
            if queue == _SEND:
                self._send(a, i, ready, cause)
            elif queue == _COPY:
                copy = self.actors[a].program.instructions[i]
                assert copy.micro_batch is not None, "a copy must have a micro-batch"
                seconds = self._work.copying(copy.target, self.actors[a].ranks, copy.micro_batch)
                self._begin(a, i, ready, (a, cause), seconds, ())
            else:
                self._enter(a, i, ready, cause, queue)

    def _send(self, a: int, i: int, ready: float, cause: int) -> None:
        actor = self.actors[a]
        message, _ = actor.program.messages[i]
        role = actor.role_of[message.micro_batch]
        size = self._work.message_bytes(role.pipeline, message.micro_batch - role.micro_batches.start)
        seconds, used = self._roads.message(actor.pairs(i), size) if size is not None else (0.0, ())
        self._begin(a, i, ready, (a, cause), seconds, used)

    def _begin(
        self, a: int, i: int, ready: float, cause: tuple[int, int], seconds: float, used: tuple[tuple[int, float], ...]
    ) -> None:
        times = self.times[a]
        if i in self._summed[a]:  # the time between the two halves of a push counts as transfer
            times.alone[i] += ready - self._summed[a][i] + seconds
        else:
            times.begin[i] = ready
            times.alone[i] = seconds
            times.actor[i], times.index[i] = cause if cause[1] >= 0 else (-1, -1)
        self._flows.begin(ready, Flow(a, i, seconds, used))

    def _enter(self, a: int, i: int, ready: float, cause: int, queue: int) -> None:
        meeting = self._meeting(queue, self.actors[a].program.instructions[i].target)
        row = meeting.passage.partners[a]
        if not row[a]:
            self._begin(a, i, ready, (a, cause), 0.0, ())
            return
        meeting.entered[a] = (i, ready, (a, cause))
        if meeting.passage.whole:
            if len(meeting.entered) == len(self.actors):
                last = max(meeting.entered, key=lambda b: meeting.entered[b][1])  # the first of equally late actors
                self._begin_together(meeting, range(len(self.actors)), [last] * len(self.actors))
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
            own = meeting.entered[b][0]
            _, ready, cause = meeting.entered[last]
            self._begin(b, own, ready, cause, float(passage.seconds[b]), passage.occupied[b])

    def _meeting(self, queue: int, bucket: str) -> _Meeting:
        if (queue, bucket) not in self._meetings:
            moved = (
                self._work.handed_on(bucket)
                if queue == _HAND
                else self._work.moved(Op.PULL if queue == _PULL else Op.PUSH, bucket)
            )
            passage = self._passage(moved)
            count = len(self.actors)
            self._meetings[queue, bucket] = _Meeting(
                passage, passage.partners.sum(1), np.full(count, -1.0), np.full(count, -1), {}
            )
        return self._meetings[queue, bucket]

    def _finish(self, a: int, i: int, now: float) -> None:
        times = self.times[a]
        actor = self.actors[a]
        op = actor.program.instructions[i].op
        queue = _QUEUES[op]
        if queue == _PUSH and i in self._handed_on[a]:
            if i in self._summed[a]:
                queue = _HAND
            else:
                self._summed[a][i] = now
                self._free[a][queue] = now
                self._before[a][queue] = i
                self._dirty.append(a)
                return
        times.end[i] = now
        self._free[a][queue] = now
        self._before[a][queue] = i
        self._close(a, i, now)
        if op is Op.SEND:
            self._arrive(a, i, now)

    def _close(self, a: int, i: int, now: float) -> None:
        self._open[a] -= 1
        if now >= self._other[a][0]:
            self._other[a] = now, i
        self._dirty.append(a)

    def _arrive(self, a: int, i: int, now: float) -> None:
        actor = self.actors[a]
        message, turn = actor.program.messages[i]
        target = actor.receivers(message)
        if (turn + 1) * len(actor.ranks) < len(target):
            return
        b = self._group[target[0]]
        index = self._arriving[b].get(message)
        if index is None:
            return
        times = self.times[b]
        times.begin[index] = times.end[index] = now
        times.actor[index] = a
        times.index[index] = i
        self._close(b, index, now)


def _receives(actor: Actor) -> dict[StageMessage, int]:
    program = actor.program
    return {message_of(program.instructions[i]): i for i in program.receives}


def _durations(actor: Actor, work: Priced) -> list[float]:
    program = actor.program
    durations = [0.0] * len(program.instructions)
    tables: dict[tuple[Op, str], dict[int, float]] = {}
    numbers = tuple(actor.role_of)
    for i in program.compute:
        instruction = program.instructions[i]
        op = instruction.op
        if op is Op.FORWARD or op is Op.BACKWARD:
            assert instruction.micro_batch is not None, "a computation must have a micro-batch"
            table = tables.get((op, instruction.target))
            if table is None:
                seconds = work.computing(op, instruction.target, actor.ranks, numbers)
                table = tables[op, instruction.target] = dict(zip(numbers, seconds, strict=True))
            durations[i] = table[instruction.micro_batch] * SHARES.get(instruction.work, 1.0)
        elif op is Op.COMMIT:
            durations[i] = -1.0
        elif op is Op.UPDATE:
            durations[i] = max(work.update_s(rank) for rank in actor.ranks)
    return durations

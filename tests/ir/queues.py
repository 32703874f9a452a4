"""Simulation of device queues, to check whether programs end when they run over NCCL.

With NCCL, a device's queues wait for messages, but the host does not:

    host         queues all work in program order; waits only when a communicator connects at its first use
    compute      runs in program order; a computation waits for its messages, its weights and its tensor-parallel peers
    messages     run in program order per communicator; a send and its receive wait for each other. A send also waits
                 for all computations before it; a receive waits for those before its rank's last send
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hydragraph.ir.deadlock import Deadlock, find_deadlock
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind

_COMPUTED = (Op.FORWARD, Op.BACKWARD)


class Transport(Enum):
    GLOO = "gloo"

    NCCL = "NCCL, a communicator per pair of ranks and direction, connected before the program runs"
    NCCL_LAZY = "NCCL, a communicator per pair of ranks and direction, connected at its first use"
    NCCL_BOUND = "NCCL, a communicator per direction, as in groups that are bound to a device"


@dataclass(frozen=True)
class Stuck:
    """Instruction index of a stuck rank, and ranks that it waits for (itself if its own queues wait for each other)."""

    at: int
    waits: tuple[int, ...]


@dataclass(eq=False)
class _Message:
    """Send or receive, which waits until its rank has run `after` computations."""

    rank: int
    peer: int
    sends: bool
    at: int
    after: int
    done: bool = False


@dataclass(frozen=True)
class _Computation:
    at: int
    key: tuple[Op, str, int | None]
    peers: tuple[int, ...]
    messages: tuple[_Message, ...]
    unpulled: tuple[int, ...]


@dataclass
class _Rank:
    compute: list[_Computation] = field(default_factory=list)
    done: int = 0
    queues: dict[Hashable, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))


def deadlock_over(programs: Sequence[RankProgram], transport: Transport) -> Deadlock | None:
    """Like `find_deadlock`, for any transport."""
    if transport is Transport.GLOO:
        return find_deadlock(programs)
    queued = run_queues(programs, transport)
    stuck_at = {rank: stuck.at for rank, stuck in queued.items()}
    return Deadlock(stuck_at, {rank: stuck.waits for rank, stuck in queued.items()}) if queued else None


def run_queues(programs: Sequence[RankProgram], transport: Transport) -> dict[int, Stuck]:
    if transport is Transport.NCCL_LAZY and (unmet := _connect(programs)):
        return unmet
    ranks = _queued(programs, transport)
    _run(ranks, transport)
    return {rank: stuck for rank, _ in enumerate(ranks) if (stuck := _stuck(rank, ranks, transport)) is not None}


def _connect(programs: Sequence[RankProgram]) -> dict[int, Stuck]:
    met: set[Hashable] = set()
    meetings: list[deque[tuple[int, Hashable, tuple[int, ...]]]] = []
    for program in programs:
        uses = ((at, *_use(program, i)) for at, i in enumerate(program.instructions) if _uses(program, i))
        first: dict[Hashable, tuple[int, Hashable, tuple[int, ...]]] = {}
        for use in uses:
            first.setdefault(use[1], use)
        meetings.append(deque(first.values()))
    waiting = deque(range(len(programs)))
    while waiting:
        queue = meetings[waiting.popleft()]
        while queue:
            _, key, members = queue[0]
            if not all(meetings[r] and meetings[r][0][1] == key for r in members):
                break
            met.add(key)
            for rank in members:
                meetings[rank].popleft()
                waiting.append(rank)
    return {
        rank: Stuck(
            queue[0][0], tuple(r for r in queue[0][2] if not (meetings[r] and meetings[r][0][1] == queue[0][1]))
        )
        for rank, queue in enumerate(meetings)
        if queue
    }


def _uses(program: RankProgram, instruction: Instruction) -> bool:
    together = instruction.op in _COMPUTED and len(program.tp) > 1
    return together or instruction.op in (Op.SEND, Op.RECEIVE)


def _use(program: RankProgram, instruction: Instruction) -> tuple[Hashable, tuple[int, ...]]:
    if instruction.op in _COMPUTED:
        members = tuple(sorted(program.tp))
        return members, members
    assert instruction.peer is not None, "a send or receive must have a peer"
    pair = (program.rank, instruction.peer)
    return ("message", *(pair if instruction.op is Op.SEND else pair[::-1])), pair


def _queued(programs: Sequence[RankProgram], transport: Transport) -> list[_Rank]:
    lacking: Mapping[str, tuple[int, ...]] = _lacking(programs)
    everyone = tuple(range(len(programs)))
    ranks = []
    for program in programs:
        rank = _Rank()
        by_value: dict[Value, _Message] = {}
        marked = 0
        for at, instruction in enumerate(program.instructions):
            if instruction.op in (Op.SEND, Op.RECEIVE):
                assert instruction.peer is not None, "a send or receive must have a peer"
                sends = instruction.op is Op.SEND
                marked = len(rank.compute) if sends else marked
                end = _Message(program.rank, instruction.peer, sends, at, marked)
                rank.queues[_communicator(end, transport)].append(end)
                by_value |= dict.fromkeys(instruction.writes, end)
            elif instruction.op in (*_COMPUTED, Op.FREE, Op.COMMIT):
                computes = instruction.op in _COMPUTED
                # `after` may not list all reads.
                needs = dict.fromkeys(by_value[v] for v in (*instruction.after, *instruction.reads) if v in by_value)
                if instruction.op is Op.FREE and not any(v.kind is ValueKind.MESSAGE for v in instruction.reads):
                    continue
                pulls = (v.exchange for v in instruction.reads if computes and v.kind is ValueKind.WEIGHTS)
                absent = tuple(dict.fromkeys(r for pull in pulls for r in lacking.get(pull, everyone)))
                peers = program.tp if computes else everyone if instruction.op is Op.COMMIT else (program.rank,)
                key = (instruction.op, instruction.target, instruction.micro_batch)
                rank.compute.append(_Computation(at, key, tuple(peers), tuple(needs), absent))
        ranks.append(rank)
    return ranks


def _lacking(programs: Sequence[RankProgram]) -> dict[str, tuple[int, ...]]:
    entered = [{i.target for i in program.instructions if i.op is Op.PULL} for program in programs]
    return {bucket: tuple(r for r, own in enumerate(entered) if bucket not in own) for bucket in set().union(*entered)}


def _communicator(end: _Message, transport: Transport) -> Hashable:
    pair = (end.rank, end.peer) if end.sends else (end.peer, end.rank)
    return pair[1] > pair[0] if transport is Transport.NCCL_BOUND else pair


def _run(ranks: list[_Rank], transport: Transport) -> None:
    waiting = deque(range(len(ranks)))
    while waiting:
        rank = waiting.popleft()
        moved = True
        while moved:
            moved = False
            while (computation := _current(ranks[rank])) is not None and not _late(rank, computation, ranks):
                for peer in computation.peers:
                    ranks[peer].done += 1
                    waiting.extend([peer] if peer != rank else [])
                moved = True
            for queue in ranks[rank].queues.values():
                while queue and (other := _other_end(queue[0], ranks, transport)) is not None:
                    end = queue.popleft()
                    ranks[end.peer].queues[_communicator(other, transport)].popleft()
                    end.done = other.done = moved = True
                    waiting.append(end.peer)


def _current(rank: _Rank) -> _Computation | None:
    return rank.compute[rank.done] if rank.done < len(rank.compute) else None


def _late(rank: int, computation: _Computation, ranks: Sequence[_Rank]) -> bool:
    for peer in computation.peers:
        current = computation if peer == rank else _current(ranks[peer])
        if current is None or current.key != computation.key or current.unpulled:
            return True
        if not all(message.done for message in current.messages):
            return True
    return False


def _other_end(end: _Message, ranks: Sequence[_Rank], transport: Transport) -> _Message | None:
    queue = ranks[end.peer].queues.get(_communicator(end, transport)) if end.peer < len(ranks) else None
    if not queue or ranks[end.rank].done < end.after:
        return None
    other = queue[0]
    meets = other.peer == end.rank and other.sends is not end.sends and ranks[other.rank].done >= other.after
    return other if meets else None


def _stuck(rank: int, ranks: Sequence[_Rank], transport: Transport) -> Stuck | None:
    computation = _current(ranks[rank])
    if computation is None:
        left = next((queue[0] for queue in ranks[rank].queues.values() if queue), None)
        return None if left is None else Stuck(left.at, (left.peer,))
    late = [message for message in computation.messages if not message.done]
    if late:
        head = ranks[rank].queues[_communicator(late[0], transport)][0]
        return Stuck(computation.at, (rank if ranks[rank].done < head.after else head.peer,))
    if computation.unpulled:
        return Stuck(computation.at, computation.unpulled)
    current = {peer: _current(ranks[peer]) for peer in computation.peers if peer != rank}
    behind = tuple(peer for peer, its in current.items() if its is None or its.key != computation.key)
    # If no peer is behind, a peer waits for its own messages or weights.
    return Stuck(computation.at, behind or tuple(current))

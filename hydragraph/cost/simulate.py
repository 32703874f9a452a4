"""Simulate: price the rank programs of one iteration, instruction by instruction.

Every rank has one queue per stream. An instruction starts when the one before it in its queue has ended, the values it
waits for are made, and whoever takes part is there too: a stage's ranks for a computation, the ranks it exchanges with
for a pull or push, all ranks for the commit. Nothing depends on which of two events comes first, so no clock is needed:
each time is a maximum of earlier times plus a duration. Streams share no bandwidth here; within one, a rank's incoming
and outgoing messages each go one after another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydragraph.cost.work import Work
from hydragraph.ir.instruction import Instruction, Op, RankProgram, Stream
from hydragraph.spec.cluster import Cluster


@dataclass(frozen=True)
class Span:
    """When an instruction ran: its index in its rank's program, itself, and its start and end in seconds."""

    index: int
    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """When every rank runs what, in seconds from the start of the iteration.

    Attributes:
        ranks: each rank's spans, in the order of its instructions.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """When the last instruction ends."""
        return max((span.end_s for spans in self.ranks for span in spans), default=0.0)

    def busy_s(self, rank: int, stream: Stream) -> float:
        """Return how long a rank's stream is at work."""
        return sum(span.seconds for span in self.ranks[rank] if span.instruction.stream is stream)

    def exposed_s(self, rank: int, stream: Stream) -> float:
        """Return how long a rank's computation, or its commit, waits for what a stream brings.

        Waits count as in a run (`runtime.trace.Exposed`): values are waited for one after another, and what is waited
        for may itself not have begun, as for an activation that another stage has yet to compute.
        """
        return sum(seconds for source, seconds in _waits(self.ranks[rank]) if source is stream)

    @property
    def bubble(self) -> float:
        """The share of time, from 0 to 1, in which ranks that compute anything do not; 0 when there are none."""
        working = [rank for rank in range(len(self.ranks)) if self.busy_s(rank, Stream.COMPUTE) > 0]
        if not working:
            return 0.0
        return 1 - sum(self.busy_s(rank, Stream.COMPUTE) for rank in working) / (len(working) * self.seconds)

    def __str__(self) -> str:
        """One line per rank: milliseconds that each stream is at work, and how much of the time is no computation."""
        names = "".join(f"{stream.value:>12}" for stream in Stream)
        lines = [f"rank{names}        idle"]
        for rank in range(len(self.ranks)):
            busy = "".join(f"{1e3 * self.busy_s(rank, stream):>9.3f} ms" for stream in Stream)
            idle = 1 - self.busy_s(rank, Stream.COMPUTE) / self.seconds if self.seconds else 0.0
            lines.append(f"{rank:>4}{busy}{idle:>11.1%}")
        return "\n".join([*lines, f"iteration {1e3 * self.seconds:.3f} ms, bubble {self.bubble:.1%}"])


def _waits(spans: Sequence[Span]) -> Iterator[tuple[Stream, float]]:
    """Yield each wait of a rank's computation: for which stream, and its seconds."""
    made: dict[str, Span] = {}
    latest: dict[Stream, Span] = {}
    free = 0.0  # when computation could go on
    for span in spans:
        each = span.instruction
        if each.stream is Stream.COMPUTE:
            needed = [made[value] for value in each.after]
            if each.op is Op.COMMIT:
                needed = [latest[stream] for stream in (Stream.PULL, Stream.PUSH, Stream.P2P) if stream in latest]
            for other in needed:
                if other.end_s > free:
                    yield other.instruction.stream, other.end_s - free
                    free = other.end_s
            free = max(free, span.end_s)
        latest[each.stream] = span
        made.update(dict.fromkeys(each.writes, span))


def simulate(programs: Sequence[RankProgram], cluster: Cluster, work: Work) -> Timeline:
    """Price one iteration.

    Args:
        programs: one per rank, in the order of the ranks; verified (`hydragraph.ir.verify`).
        cluster: one device per rank.
        work: what their instructions cost.

    Raises:
        ValueError: when ranks and devices differ in number, or the programs never end.
    """
    if len(programs) != len(cluster.devices):
        raise ValueError(f"{len(programs)} rank programs on {len(cluster.devices)} devices: give one device per rank")
    return _Run(programs, cluster, work).run()


@dataclass
class _Exchange:
    """One rank's part in a pull or push: with whom, and how long its messages in and out take."""

    partners: set[int]
    incoming_s: float = 0.0
    outgoing_s: float = 0.0


def _exchanges(cluster: Cluster, pairs: Mapping[tuple[int, int], float]) -> dict[int, _Exchange]:
    found: dict[int, _Exchange] = {}
    for (source, target), size in pairs.items():
        link = cluster.link(source, target)
        seconds = link.latency_s + size / link.bytes_per_s
        sender, receiver = (found.setdefault(rank, _Exchange({rank})) for rank in (source, target))
        sender.partners.add(target)
        sender.outgoing_s += seconds
        receiver.partners.add(source)
        receiver.incoming_s += seconds
    return found


class _Run:
    """What is known so far: when instructions could start (entered), and when they started and ended."""

    def __init__(self, programs: Sequence[RankProgram], cluster: Cluster, work: Work) -> None:
        self.programs, self.cluster, self.work = programs, cluster, work
        self.needs = [_needs(program) for program in programs]
        self.queues = [_queues(program) for program in programs]
        self.spans: list[dict[int, Span]] = [{} for _ in programs]
        self.entered: dict[tuple[Op, str, int | None], dict[int, float]] = defaultdict(dict)
        self.arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)  # (from, to), not yet received
        self.exchanges = {
            (op, bucket): _exchanges(cluster, pairs)
            for op, sizes in ((Op.PULL, work.pull_bytes), (Op.PUSH, work.push_bytes))
            for bucket, pairs in sizes.items()
        }

    def run(self) -> Timeline:
        """Run every queue as far as it gets, until nothing moves."""
        waiting = deque(range(len(self.programs)))
        while waiting:
            rank = waiting.popleft()
            woken = {other for queue in self.queues[rank] for other in self._advance(rank, queue)}
            waiting.extend(sorted(woken - set(waiting)))
        for rank, program in enumerate(self.programs):
            if len(self.spans[rank]) < len(program.instructions):
                raise ValueError(f"rank {rank} never ends: verify() these programs, it names who waits for whom")
        return Timeline(tuple(tuple(spans[i] for i in sorted(spans)) for spans in self.spans))

    def _advance(self, rank: int, queue: deque[int]) -> Iterator[int]:
        """Run the head of a queue for as long as it can; yield the ranks that may go on because of it."""
        while queue:
            index, spans = queue[0], self.spans[rank]
            if any(need not in spans for need in self.needs[rank][index]):
                return
            each = self.programs[rank].instructions[index]
            ready = max((spans[need].end_s for need in self.needs[rank][index]), default=0.0)
            entered, partners = self.entered[each.op, each.target, each.micro_batch], self._partners(rank, each)
            if len(partners) > 1 and rank not in entered:
                yield from partners
            entered[rank] = ready
            if any(partner not in entered for partner in partners):
                return
            if each.op is Op.RECEIVE and not self.arrivals[_peer(each), rank]:
                return
            start = max((entered[partner] for partner in partners), default=ready)
            spans[queue.popleft()] = Span(index, each, *self._times(rank, each, start, partners))
            yield rank
            if each.op is Op.SEND:
                self.arrivals[rank, _peer(each)].append(spans[index].end_s)
                yield _peer(each)

    def _partners(self, rank: int, each: Instruction) -> Collection[int]:
        """Return the ranks that must be at the same instruction; none where a rank acts alone."""
        if each.op in (Op.FORWARD, Op.BACKWARD):
            return self.programs[rank].tp
        if each.op is Op.COMMIT:
            return range(len(self.programs))
        exchange = self.exchanges.get((each.op, each.target), {}).get(rank)
        return exchange.partners if exchange else ()

    def _times(self, rank: int, each: Instruction, start: float, partners: Collection[int]) -> tuple[float, float]:
        """Return when an instruction that can start at `start` starts and ends."""
        if each.op in (Op.FORWARD, Op.BACKWARD):
            return start, start + max(self.work.seconds.get((each.op, each.target, p), 0.0) for p in partners)
        if each.op in (Op.PULL, Op.PUSH) and partners:
            exchange = self.exchanges[each.op, each.target][rank]
            return start, start + max(exchange.incoming_s, exchange.outgoing_s)
        if each.op is Op.SEND:
            link, pipeline = self.cluster.link(rank, _peer(each)), self.programs[rank].pipeline
            assert pipeline is not None, "a rank without a stage sends nothing"
            return start, start + link.latency_s + self.work.activation_bytes.get(pipeline, 0.0) / link.bytes_per_s
        if each.op is Op.RECEIVE:  # the time is the send's
            end = max(start, self.arrivals[_peer(each), rank].popleft())
            return end, end
        return start, start + self.work.seconds.get((each.op, each.target, rank), 0.0)


def _queues(program: RankProgram) -> tuple[deque[int], ...]:
    """Return the indices of a program's instructions, by stream."""
    return tuple(deque(i for i, each in enumerate(program.instructions) if each.stream is stream) for stream in Stream)


def _needs(program: RankProgram) -> list[tuple[int, ...]]:
    """Return, for each instruction, those that must have ended: the one before it in its stream, and its `after`.

    The commit waits for everything before it, pushes included.
    """
    found: list[tuple[int, ...]] = []
    latest: dict[Stream, int] = {}
    maker: dict[str, int] = {}
    for index, each in enumerate(program.instructions):
        if each.op is Op.COMMIT:
            needs = set(latest.values())
        else:
            needs = {maker[value] for value in each.after} | ({latest[each.stream]} if each.stream in latest else set())
        found.append(tuple(sorted(needs)))
        latest[each.stream] = index
        maker.update(dict.fromkeys(each.writes, index))
    return found


def _peer(instruction: Instruction) -> int:
    assert instruction.peer is not None, "a send or receive has a peer"
    return instruction.peer

"""Memory of one rank in one iteration, from its program and compiled graphs.

A rank's shard of the state needs 16 bytes per trained element (weight, gradient and AdamW's two moments in fp32; see
`state_bytes`), and 4 per frozen element. Temporary memory of kernels and of the optimizer is not included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
from hydragraph.cost.live_values import LiveValues
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES, WEIGHT_BYTES, BucketTraffic, HomeTraffic, MessageBytes
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.schedules.schedule_kinds import ALL_IN_FLIGHT, most_in_flight
from hydragraph.ir.value import Value, ValueKind, activation, activation_gradient, aux, bucket_of, gradients, weights
from hydragraph.passes.pipeline import placed_program
from hydragraph.passes.place import Placement, place
from hydragraph.passes.stream import turns
from hydragraph.spec.home import Home
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.strategy import Strategy

if TYPE_CHECKING:
    from hydragraph.cost.compiled_blocks import CompiledBlocks
    from hydragraph.cost.profile_blocks import ProfileBlocks

    Blocks: TypeAlias = CompiledBlocks | ProfileBlocks

ADAMW_STATE_BYTES = 3 * WEIGHT_BYTES
INTEGER_BYTES = 8


@dataclass(frozen=True)
class Memory:
    """Memory of one rank at its peak, in bytes.

    Attributes:
        home_weights, optimizer_state, home_gradients: the rank's share of the state, in fp32.
        weights, gradients: weights and gradient sums of the rank's stage.
        activations: mini-batch, hidden states and values saved for backwards.
        working: temporary values of a block's graph.
        messages: copies for sending, and received data that is not yet summed.
        host: offloaded activations in host memory, not included in the total.
    """

    home_weights: int
    optimizer_state: int
    home_gradients: int
    weights: int = 0
    gradients: int = 0
    activations: int = 0
    working: int = 0
    messages: int = 0
    host: int = 0

    @property
    def home(self) -> int:
        return self.home_weights + self.optimizer_state + self.home_gradients

    @property
    def total(self) -> int:
        return self.home + self.weights + self.gradients + self.activations + self.working + self.messages


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a rank over an iteration.

    Attributes:
        points: (seconds, bytes from then on), without peaks within instructions.
    """

    peak: Memory
    peak_s: float
    points: tuple[tuple[float, int], ...]

    def at(self, seconds: float) -> int:
        if not self.points:
            return self.peak.total
        after = bisect_right(self.points, seconds, key=itemgetter(0))
        return self.points[max(after - 1, 0)][1]


def home_memory(traffic: HomeTraffic, rank: int, state_bytes: int) -> Memory:
    learning = traffic.owned(rank, True)
    return Memory(
        home_weights=WEIGHT_BYTES * traffic.owned(rank),
        optimizer_state=(state_bytes - WEIGHT_BYTES) * learning,
        home_gradients=GRADIENT_BYTES * learning,
    )


def batch_bytes(own: int, every: int) -> int:
    """Return the bytes of a rank's ids, positions and labels, and of all tokens' shifted labels."""
    return INTEGER_BYTES * (3 * own + every)


def micro_batches_until_peak(schedule: str, rows: Sequence[int], position: int) -> int | None:
    """Return how many micro-batches decide a stage's peak; None: all.

    The first stage stores the micro-batches in flight and one returning gradient. A later stage stores the
    micro-batches in flight, the next hidden state and two gradients in transit.
    """
    devices = len(set(rows))
    # Interleaved: each group of devices runs several stages, in rounds of `devices` micro-batches.
    if devices < len(rows):
        # One round begins while another ends.
        return None if schedule == ALL_IN_FLIGHT else 3 * devices + 3
    most = most_in_flight(schedule, devices)[position]
    return None if most is None else most + (1 if position == 0 else 3)


def exchange_name(op: Op, bucket: str) -> str:
    return f"{op.value} {bucket}"


@lru_cache(128)
def _placed(
    outline: Outline, strategy: Strategy, counts: tuple[int, ...], rank: int, ranks: int
) -> tuple[Placement, tuple[Instruction, ...], Mapping[tuple[Op, str], tuple[tuple[int, ...], ...]]]:
    placement = place(outline, strategy, counts)
    return (
        placement,
        placed_program(placement, "", "train", rank, ranks).instructions,
        _users(outline, strategy, counts),
    )


@lru_cache(16)
def _users(
    outline: Outline, strategy: Strategy, counts: tuple[int, ...]
) -> Mapping[tuple[Op, str], tuple[tuple[int, ...], ...]]:
    return {(turn.op, turn.name): turn.stages for turn in turns(place(outline, strategy, counts), "train")}


class MemoryWalk:
    """A rank's memory after each instruction of an iteration.

    Args:
        blocks: the blocks' memory, exact or approximate.
        messages: whether to include pulls and pushes, which are in flight until an instruction waits for them.
        traffic: layouts of all buckets, reusable for other ranks; default: ranks own equal shares.
        state_bytes: bytes of state per trained element; default: AdamW's.
        over: instruction index -> names (`exchange_name`) of pulls and pushes that end before the instruction, although
            it does not wait for them; None: none.
    """

    def __init__(
        self,
        blocks: Blocks,
        strategy: Strategy,
        micro_batches: Sequence[Sequence[MicroBatch]],
        rank: int,
        ranks: int,
        *,
        messages: bool = True,
        traffic: HomeTraffic | None = None,
        state_bytes: int = ADAMW_STATE_BYTES,
        over: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        counts = tuple(len(pipeline) for pipeline in micro_batches)
        strategy.check(blocks.outline.layers, ranks)
        placement, self._instructions, self._users = _placed(blocks.outline, strategy, counts, rank, ranks)
        self._model = blocks
        self._rank = rank
        self._messages = messages
        self._over = over or {}
        self._traffic = traffic or HomeTraffic(blocks.buckets, HomeLayouts(Home(), ranks).of)
        self.at_home = home_memory(self._traffic, rank, state_bytes)
        self._stages = placement.stage_of
        self._stage = placement.stage_of.get(rank)
        self._part = self._stage.part_of(rank) if self._stage else StagePart()
        self._buckets = {b.name: b for b in blocks.buckets}
        self._footprint_of = cache(blocks.footprint)
        self._traffic_of = cache(self._find_traffic)

        def pulled(traffic: BucketTraffic) -> MessageBytes:
            if messages:
                return traffic.pulled(rank, ranks, blocks.itemsize)
            return MessageBytes(0, traffic.pulled_bytes(rank, blocks.itemsize))

        self._pulled = cache(pulled)
        self._pushed = cache(partial(BucketTraffic.pushed, rank=rank, itemsize=blocks.push_itemsize))
        self._sums_at_home = cache(partial(BucketTraffic.sums_at_home, rank=rank))
        self._begin(micro_batches)

    def again(self, micro_batches: Sequence[Sequence[MicroBatch]]) -> MemoryWalk:
        walk = copy(self)
        walk._begin(micro_batches)
        return walk

    def _begin(self, micro_batches: Sequence[Sequence[MicroBatch]]) -> None:
        # Micro-batches of this rank's pipelines (several if shared).
        self._batches = {
            m: batch
            for role in (self._stage.roles if self._stage else ())
            for m, batch in zip(role.micro_batches, micro_batches[role.pipeline], strict=True)
        }
        self._everyones = sum(m.tokens for pipeline in micro_batches for m in pipeline)
        self._in_flight: list[str] = []
        self._pushed_before: set[str] = set()  # buckets
        self._alive = LiveValues()
        self._on_host: dict[Value, int] = {}
        self._most_on_host = 0
        self._most = -1
        self._largest: dict[str, int] = {}

    def peak(self) -> Memory:
        return self.curve()[0]

    def curve(self) -> tuple[Memory, int, list[int]]:
        """Return the peak memory, the index of the peak's instruction, and the bytes after each instruction."""
        own = sum(m.tokens for m in self._batches.values())
        # Ids, positions and labels stay for the whole iteration.
        self._alive.add("batch", "activations", batch_bytes(own, self._everyones))
        at = -1
        after = []
        for i, instruction in enumerate(self._instructions):
            self._alive.drop(*self._over.get(i, ()))
            before = self._most
            self._run(instruction)
            at = i if self._most > before else at
            after.append(self.at_home.home + self._alive.total)
        return replace(self.at_home, **self._largest, host=self._most_on_host), at, after

    def _measure(self, working: int) -> None:
        if self._alive.total + working > self._most:
            self._most = self._alive.total + working
            self._largest = {"working": working, **self._alive.sums}

    def _run(self, instruction: Instruction) -> None:
        # The instruction waits for `after`. A pull's buffers end where its weights are used, a
        # push's before a later push that waits for it.
        for value in instruction.after if self._messages else ():
            if value.kind is ValueKind.WEIGHTS:
                self._alive.drop(exchange_name(Op.PULL, value.exchange))
            elif instruction.op is Op.PUSH and value not in instruction.reads:
                self._alive.drop(exchange_name(Op.PUSH, value.exchange))
        if instruction.op is Op.PULL:
            self._pull(instruction.target, held=bool(instruction.writes))
        elif instruction.op is Op.FORWARD:
            self._forward(instruction)
        elif instruction.op is Op.BACKWARD:
            self._backward(instruction)
        elif instruction.op is Op.OFFLOAD:
            self._offload(instruction)
        elif instruction.op is Op.FETCH:
            (host,) = instruction.reads
            self._alive.add(instruction.writes[0], "activations", self._on_host[host], host)
        elif instruction.op is Op.RECEIVE:
            self._hidden(instruction.writes[0])
        elif instruction.op is Op.SEND:
            self._alive.add(instruction.writes[0], "messages", 0, *instruction.reads)
        elif instruction.op is Op.PUSH:
            self._push(instruction.target)
        self._measure(0)
        if instruction.op is Op.COMMIT:
            self._alive.drop(*self._in_flight)
        elif instruction.op is Op.FREE:
            self._alive.drop(*instruction.reads)
            for value in instruction.reads:
                self._on_host.pop(value, None)

    def _offload(self, instruction: Instruction) -> None:
        (saved,) = instruction.reads
        host, leaving = instruction.writes
        block = self._footprint(instruction.target, instruction.batch)
        hidden = self._hidden_bytes(instruction.batch) // (self._part.tp if self._part.sequence_parallel else 1)
        moved, stays = block.offloaded(hidden)
        self._alive.add(leaving, "activations", 0, saved)
        self._alive.shrink(saved, "activations", block.small)
        self._alive.add(host, "activations", block.small, saved, named=self._kept(instruction, stays))
        self._on_host[host] = moved
        self._most_on_host = max(self._most_on_host, sum(self._on_host.values()))

    def _fly(self, message: str, size: int, *shared: str) -> None:
        if self._messages:
            self._alive.add(message, "messages", size, *shared)
            self._in_flight.append(message)

    def _pull(self, name: str, held: bool) -> None:
        if not (held or self._messages):
            return
        link = self._pulled(self._traffic_of(Op.PULL, name))
        self._fly(exchange_name(Op.PULL, name), link.outgoing)
        if held:
            self._alive.add(weights(name), "weights", link.incoming)

    def _push(self, name: str) -> None:
        if not self._messages:
            self._alive.drop(gradients(name))
            return
        traffic = self._traffic_of(Op.PUSH, name)
        link = self._pushed(traffic)
        total = gradients(name)
        kept = () if link.outgoing else (total,)  # without a copy, the value itself is sent
        # Gradients move to first, then to second owners.
        size = max(link.outgoing + link.incoming, link.handed)
        # A bucket's second push (of another pipeline or stage) is received alongside the first
        # owner's sum.
        if bucket_of(name) in self._pushed_before and not self._stays_home(name):
            size += GRADIENT_BYTES * traffic.owners.first.local_size(self._rank)
        self._pushed_before.add(bucket_of(name))
        self._fly(exchange_name(Op.PUSH, name), size, *kept)
        self._alive.drop(total)

    def _find_traffic(self, op: Op, name: str) -> BucketTraffic:
        users = self._users[op, name]
        splits = (self._stages[ranks[0]].kind.sequence_parallel for ranks in users)
        kinds = [GradientKind.PARTIAL if split else GradientKind.REPLICA for split in splits]
        return self._traffic.of(self._buckets[bucket_of(name)], users, kinds)

    def _forward(self, instruction: Instruction) -> None:
        m = instruction.batch
        if instruction.target == "aux":
            self._alive.add(aux(m), "activations", self._model.aux_bytes(self._batches[m]))
            return
        block = self._footprint(instruction.target, m)
        enters, leaves = self._borders(instruction.target)
        part = self._hidden_bytes(m) // self._part.tp if enters else 0
        self._measure(block.forward + part)
        self._alive.add(instruction.writes[0], "activations", self._hidden_bytes(m) if leaves else block.output)
        if len(instruction.writes) > 1:
            # Saved values that are also other live values (such as the input) count once.
            shared = self._kept(instruction, block.keeps - {"hidden"} if enters else block.keeps)
            # At a sequence-parallel stage's border, the saved input is this rank's part, a separate
            # tensor.
            own = block.saved + (part if "hidden" in block.keeps else 0)
            self._alive.add(instruction.writes[1], "activations", own, *shared)

    def _backward(self, instruction: Instruction) -> None:
        m = instruction.batch
        block = self._footprint(instruction.target, m)
        enters, leaves = self._borders(instruction.target)
        part = self._hidden_bytes(m) // self._part.tp if leaves else 0
        # A bucket's first backward allocates its gradient sum; later ones add to it.
        sums = [v for v in instruction.writes if v.kind is ValueKind.GRADIENTS and v not in self._alive]
        # Gradient sums exist during the computation
        if self._model.adds(instruction.target, self._part):
            self._begin_sums(sums)
        work = instruction.work
        if work is Work.BACKWARD:
            self._measure(block.backward + part)
        else:
            halves = self._model.halves(instruction.target, self._part, self._batches[m])
            self._measure(halves.first + part if work is Work.INPUT_GRADIENT else halves.second)
            if work is Work.INPUT_GRADIENT:
                self._postpone(instruction, halves)
        self._alive.drop(instruction.reads[0])
        for value in instruction.writes:
            if value.kind is ValueKind.ACTIVATION_GRADIENT:
                self._hidden(value, whole=enters or not self._part.sequence_parallel)
        self._begin_sums([value for value in sums if value not in self._alive])
        self._measure(0 if work is Work.INPUT_GRADIENT else block.gradients)

    def _postpone(self, instruction: Instruction, halves: HalvesFootprint) -> None:
        tangent = activation_gradient(self._model.outline.index[instruction.target], instruction.batch)
        later = instruction.writes[-1]
        named = self._kept(instruction, halves.keeps)
        self._alive.add(later, "activations", halves.postponed, instruction.reads[0], tangent, named=named)

    def _kept(self, instruction: Instruction, keeps: frozenset[str]) -> set[str]:
        k = self._model.outline.index[instruction.target]
        m = instruction.batch
        names = {
            "hidden": activation(k - 1, m),
            "aux": aux(m),
            "output": activation(k, m),
            "tangent": activation_gradient(k, m),
        }
        return {names[keep] for keep in keeps}

    def _begin_sums(self, values: Sequence[Value]) -> None:
        for value in values:
            users = self._traffic_of(Op.PUSH, value.exchange).users
            size = 0 if value.bucket in self._at_home else GRADIENT_BYTES * users.local_size(self._rank)
            self._alive.add(value, "gradients", size)

    @cached_property
    def _at_home(self) -> frozenset[str]:
        pushes = [name for op, name in self._users if op is Op.PUSH]
        apart = {bucket_of(name) for name in pushes if not self._stays_home(name)}
        return frozenset(map(bucket_of, pushes)) - apart

    def _stays_home(self, push: str) -> bool:
        return self._sums_at_home(self._traffic_of(Op.PUSH, push))

    def _hidden(self, value: Value, whole: bool = True) -> None:
        size = self._hidden_bytes(value.micro_batch)
        self._alive.add(value, "activations", size if whole else size // self._part.tp)

    def _hidden_bytes(self, m: int) -> int:
        return self._batches[m].tokens * self._model.hidden_bytes

    def _borders(self, block: str) -> tuple[bool, bool]:
        """Return whether sequence-parallel ranks receive a block's whole input and send its whole output."""
        if not self._part.sequence_parallel:
            return False, False
        stage = self._stage
        index = self._model.outline.index[block]
        assert stage is not None
        visit = stage.visit_of(index)
        first, end = stage.blocks[visit]
        role = next(role for role in stage.roles if role.visit == visit)
        return index == first and bool(role.previous), index == end - 1 and bool(role.following)

    def _footprint(self, block: str, m: int) -> Footprint:
        return self._footprint_of(block, self._part, self._batches[m])

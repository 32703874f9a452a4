"""Memory: the bytes of tensors that one rank holds in one iteration, from its program and its compiled graphs.

At home: weight, gradient and AdamW's two moments in fp32, 16 bytes per element of the rank's shard; 4 where it is
frozen, or the loss does not reach it. Beyond that, what its instructions make: the program is walked, values come and
go as the executor lets them, and the largest sum counts. Views share a storage, and a storage is counted once. Left out
is what operators use inside a kernel, and what the optimizer uses while it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hydragraph.cost.alive import Alive
from hydragraph.cost.footprint import Footprint, MicroBatch, footprint, made_bytes, token_bytes
from hydragraph.cost.messages import GRADIENT_BYTES, WEIGHT_BYTES, pulled, pushed
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.layout import GradientKind, Layout, home, propagation
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.pipeline import rank_program
from hydragraph.passes.place import place
from hydragraph.passes.shard import Degree
from hydragraph.spec.strategy import Strategy

STATE_BYTES = 3 * WEIGHT_BYTES  # per element at home: the weight and AdamW's two moments
INTEGER_BYTES = 8  # token ids, positions and labels

Compiled = Callable[[Block, Degree, bool], Variant]  # (block, degree, recompute) -> its graphs


@dataclass(frozen=True)
class Memory:
    """What one rank holds at the moment when it holds most, in bytes.

    Attributes:
        state: home weights and optimizer state.
        shard: the home gradients.
        weights, gradients: of the rank's stage.
        activations: the mini-batch, hidden states and what forwards save for backwards.
        working: what a block's graph makes and drops again.
        messages: what is copied for sending, or received and not yet added up.
    """

    state: int
    shard: int
    weights: int = 0
    gradients: int = 0
    activations: int = 0
    working: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        held = self.state + self.shard + self.weights + self.gradients
        return held + self.activations + self.working + self.messages


def rank_memory(
    program: Program,
    strategy: Strategy,
    micro_batches: Sequence[Sequence[MicroBatch]],
    rank: int,
    ranks: int,
    compiled: Compiled,
    messages: bool = True,
) -> Memory:
    """Estimate a rank's peak in one training iteration.

    Args:
        program: the model.
        strategy: on ranks below `ranks`.
        micro_batches: for each pipeline, those that it runs.
        compiled: gives a block's graphs, as `runtime.variants.Variants.get` does.
        messages: count what messages need too, as if all were under way until they must have arrived; False: what
            the strategy itself needs.

    Raises:
        ValueError: when these do not fit one another.
    """
    owned = {b.name: home(b.size, range(ranks)).local_size(rank) for b in program.buckets}
    learning = sum(owned[b.name] for b in program.buckets if b.learns)
    frozen = sum(owned.values()) - learning
    at_home = Memory(STATE_BYTES * learning + WEIGHT_BYTES * frozen, GRADIENT_BYTES * learning)
    walk = _Walk(program, strategy, micro_batches, rank, ranks, compiled, messages)
    return walk.peak(at_home)


class _Walk:
    """One rank's iteration, instruction by instruction, as `runtime.executor` runs it."""

    def __init__(
        self,
        program: Program,
        strategy: Strategy,
        micro_batches: Sequence[Sequence[MicroBatch]],
        rank: int,
        ranks: int,
        compiled: Compiled,
        messages: bool,
    ) -> None:
        counts = [len(each) for each in micro_batches]
        placement = place(program.outline, strategy, counts)
        self._program, self._rank, self._ranks, self._messages = program, rank, ranks, messages
        self._instructions = rank_program(program.outline, strategy, counts, rank, ranks=ranks).instructions
        self._holders = dict(placement.holders)
        self._stages = placement.stage_of
        self._stage = placement.stage_of.get(rank)
        self._degree = Degree.of(self._stage, rank) if self._stage else Degree()
        self._batches = micro_batches[self._stage.pipeline] if self._stage else ()
        self._everyones = sum(m.tokens for each in micro_batches for m in each)
        self._blocks = {b.name: b for b in program.blocks}
        self._buckets = {b.name: b for b in program.buckets}
        self._compiled = compiled
        self._known: dict[tuple[object, MicroBatch], Footprint] = {}
        self._in_flight: list[str] = []
        self._alive = Alive()

    def peak(self, at_home: Memory) -> Memory:
        """Return the largest sum, in its parts."""
        own = sum(m.tokens for m in self._batches)  # ids, positions and labels; of all others the shifted labels
        self._alive.add("batch", "activations", INTEGER_BYTES * (3 * own + self._everyones))
        best, most = at_home, -1
        for instruction in self._instructions:
            for working in self._run(instruction):
                now = sum(self._alive.sums.values()) + working
                if now > most:
                    most, best = now, Memory(at_home.state, at_home.shard, working=working, **self._alive.sums)
        return best

    def _run(self, instruction: Instruction) -> Iterator[int]:
        """Follow one instruction; yield passing bytes wherever the sum may be largest."""
        for value in instruction.after:  # weights that arrive were sent, and so was what a gradient was made from
            self._alive.drop(f"pull {value[2:]}" if value[0] == "W" else f"send h{value[1:]}")
        if instruction.op is Op.PULL:
            self._pull(instruction.target, held=bool(instruction.writes))
        elif instruction.op is Op.FORWARD:
            yield from self._forward(instruction)
        elif instruction.op is Op.BACKWARD:
            yield from self._backward(instruction)
        elif instruction.op is Op.RECEIVE:
            self._hidden(instruction.writes[0])
        elif instruction.op is Op.SEND:
            self._send(instruction.reads[0])
        elif instruction.op is Op.PUSH:
            self._push(instruction.target)
        yield 0
        if instruction.op is Op.COMMIT:
            self._alive.drop(*self._in_flight)
        elif instruction.op is Op.FREE:
            self._alive.drop(*instruction.reads)

    def _send(self, value: str) -> None:
        kind, _, micro_batch = value.rpartition(".")
        if value[0] == "d":
            self._alive.drop(f"send {kind}.{int(micro_batch) - 2}")
        if f"send {value}" not in self._alive:  # else it goes to several ranks
            self._fly(f"send {value}", 0, value)

    def _fly(self, message: str, size: int, *shared: str) -> None:
        """Keep what a message needs until it has arrived, at the commit at the latest."""
        if self._messages:
            self._alive.add(message, "messages", size, *shared)
            self._in_flight.append(message)

    # Weights and gradients.

    def _pull(self, bucket: str, held: bool) -> None:
        owners, users = self._layouts(bucket)
        link = pulled(owners, users, self._rank, self._ranks, self._program.dtype.itemsize)
        self._fly(f"pull {bucket}", link.outgoing)
        if held:
            self._alive.add(f"W.{bucket}", "weights", link.incoming)

    def _push(self, bucket: str) -> None:
        link = pushed(*self._layouts(bucket), self._rank, self._ranks)
        kept = () if link.outgoing else (f"G.{bucket}",)  # what is not copied is itself the message
        self._fly(f"push {bucket}", link.outgoing + link.incoming, *kept)
        self._alive.drop(f"G.{bucket}")

    def _layouts(self, name: str) -> tuple[Layout, Layout]:
        """Return a bucket's home layout, and that of the stages which use it."""
        bucket = self._buckets[name]
        kinds = {p.name: GradientKind.REPLICA for p in bucket.parameters}  # sizes do not depend on them
        return home(bucket.size, range(self._ranks)), propagation(bucket, self._holders[name], kinds)

    # Activations.

    def _forward(self, instruction: Instruction) -> Iterator[int]:
        m = instruction.micro_batch
        assert m is not None
        if instruction.target == "aux":
            self._alive.add(
                f"a.{m}",
                "activations",
                made_bytes(self._program.templates[self._program.aux.template].graph, self._batches[m]),
            )
            return
        found, (enters, leaves) = self._footprint(instruction.target, m), self._borders(instruction.target)
        part = self._hidden_bytes(m) // self._degree.tp if enters else 0  # its own part of what came whole
        yield found.forward + part
        self._alive.add(instruction.writes[0], "activations", self._hidden_bytes(m) if leaves else found.output)
        if len(instruction.writes) > 1:
            hidden = next((v for v in instruction.reads if v[0] == "h"), "")
            names = {"hidden": "" if enters else hidden, "aux": f"a.{m}", "output": instruction.writes[0]}
            shared = (names[keep] for keep in found.keeps)
            own = found.saved + (part if "hidden" in found.keeps else 0)
            self._alive.add(instruction.writes[1], "activations", own, *shared)

    def _backward(self, instruction: Instruction) -> Iterator[int]:
        assert instruction.micro_batch is not None
        found = self._footprint(instruction.target, instruction.micro_batch)
        sums = [value for value in instruction.writes if value[0] == "G" and value not in self._alive]
        if self._variant(instruction.target).added:  # while it runs
            self._begin_sums(sums)
        yield found.backward
        self._alive.drop(instruction.reads[0])
        for value in instruction.writes:
            if value[0] == "d":
                self._hidden(value, whole=not self._degree.sequence_parallel or self._borders(instruction.target)[0])
        self._begin_sums([value for value in sums if value not in self._alive])
        yield found.gradients

    def _begin_sums(self, values: Sequence[str]) -> None:
        for value in values:
            size = self._layouts(value[2:])[1].local_size(self._rank)
            self._alive.add(value, "gradients", GRADIENT_BYTES * size if self._ranks > 1 else 0)

    def _hidden(self, value: str, whole: bool = True) -> None:
        size = self._hidden_bytes(int(value.rpartition(".")[2]))
        self._alive.add(value, "activations", size if whole else size // self._degree.tp)

    def _hidden_bytes(self, m: int) -> int:
        first = self._program.templates[self._program.blocks[0].template].graph
        return self._batches[m].tokens * token_bytes(first)

    def _borders(self, block: str) -> tuple[bool, bool]:
        """Say whether sequence-parallel ranks take a block's input, or give its output, as a whole: between stages."""
        stage, index = self._stage, self._program.outline.index[block]
        assert stage is not None
        first, last = stage.blocks[0], stage.blocks[1] - 1
        split = self._degree.sequence_parallel
        return split and index == first and bool(stage.previous), split and index == last and bool(stage.following)

    def _footprint(self, block: str, m: int) -> Footprint:
        variant = self._variant(block)
        key = (variant, self._batches[m])
        if key not in self._known:
            self._known[key] = footprint(variant, self._degree, self._batches[m])
        return self._known[key]

    def _variant(self, block: str) -> Variant:
        assert self._stage is not None
        return self._compiled(self._blocks[block], self._degree, self._stage.recompute)

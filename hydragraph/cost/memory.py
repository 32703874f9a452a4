"""Memory: the bytes of tensors that one rank holds in one iteration, from its program and its compiled graphs.

At home: weight, gradient and AdamW's two moments in fp32, 16 bytes per element of the rank's shard. Beyond that, what
its instructions make: the program is walked, values come and go as the executor lets them, and the largest sum counts.
Views share a storage, and a storage is counted once. Left out is what operators use inside a kernel, and what the
optimizer uses while it updates.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.frontend.private import symbol_name
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.layout import GradientKind, Ints, Layout, home, propagation
from hydragraph.ir.link import copy, is_all_gather, reduce
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.pipeline import rank_program
from hydragraph.passes.place import PlacedStage, place
from hydragraph.passes.shard import Degree
from hydragraph.spec.strategy import Strategy

WEIGHT_BYTES = 4  # of home weights, fp32
STATE_BYTES = 3 * WEIGHT_BYTES  # per element at home: the weight and AdamW's two moments
GRADIENT_BYTES = 4  # gradients are accumulated and pushed in fp32
INTEGER_BYTES = 8  # token ids, positions and labels

Compiled = Callable[[Block, Degree, bool], Variant]  # (block, degree, recompute) -> its graphs


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch: its tokens and its sequences, padding included."""

    tokens: int
    sequences: int


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
    owned = sum(home(b.size, range(ranks)).local_size(rank) for b in program.buckets)
    at_home = Memory(STATE_BYTES * owned, GRADIENT_BYTES * owned)
    walk = _Walk(program, strategy, micro_batches, rank, ranks, compiled, messages)
    return walk.peak(at_home)


# One block.


@dataclass(frozen=True)
class Footprint:
    """What one block makes for one micro-batch, in bytes.

    Attributes:
        output: its hidden state (the last block: its loss).
        saved: what its forward saves beyond inputs and output.
        keeps: which inputs it saves as they are: "hidden", "aux"; or "output".
        forward, backward: the most that its graphs' own values take at once, results included.
        gradients: of its parameters.
    """

    output: int
    saved: int
    keeps: frozenset[str]
    forward: int
    backward: int
    gradients: int


def footprint(variant: Variant, degree: Degree, micro_batch: MicroBatch) -> Footprint:
    """Measure a compiled block on a micro-batch."""
    sizes = _Sizes.of(variant, degree, micro_batch)
    given = dict(zip(variant.inputs, _nodes(variant.forward, "placeholder"), strict=True))
    inputs = {key: name for name, node in given.items() for key in sizes.storages(node)}
    outputs = _results(variant.forward)
    output = sizes.storages(outputs[0])
    saved = {key: size for node in outputs[variant.outputs :] for key, size in sizes.storages(node).items()}
    names = {inputs[key] for key in saved if key in inputs}
    keeps = {"hidden" if name == "hidden" else "aux" for name in names if name == "hidden" or name[:6] == "other."}
    found = dict(zip(variant.gradients, _results(variant.backward), strict=True))
    return Footprint(
        sum(output.values()),
        sum(size for key, size in saved.items() if key not in inputs and key not in output),
        frozenset(keeps | ({"output"} if output.keys() & saved.keys() else set())),
        _most(variant.forward, sizes),
        _most(variant.backward, sizes),
        sum(sum(sizes.storages(node).values()) for name, node in found.items() if name != "hidden"),
    )


@dataclass(frozen=True)
class _Sizes:
    """Turns the sizes that a graph was traced with into those of a micro-batch.

    Attributes:
        tokens: the symbol of the token count.
        factor: the micro-batch's tokens per token of the trace.
        bounds: the entries of cu_seqlens.
    """

    tokens: str
    factor: float
    bounds: int

    @staticmethod
    def of(variant: Variant, degree: Degree, micro_batch: MicroBatch) -> _Sizes:
        """Learn them from a block's inputs."""
        given = dict(zip(variant.inputs, _nodes(variant.forward, "placeholder"), strict=True))
        if "hidden" in given:
            return _Sizes.of_inputs([given["hidden"]], degree.tp if degree.sequence_parallel else 1, micro_batch)
        return _Sizes.of_inputs(list(given.values()), 1, micro_batch)

    @staticmethod
    def of_inputs(nodes: Sequence[fx.Node], parts: int, micro_batch: MicroBatch) -> _Sizes:
        """Learn them from inputs [1, tokens / parts, ...]."""
        size = next((size for n in nodes for size in _shape(n)[1:2] if symbol_name(size) is not None), None)
        if size is None:  # nothing depends on the tokens
            return _Sizes("", 1.0, 1 + micro_batch.sequences)
        factor = micro_batch.tokens / (int(size.node.hint) * parts)
        return _Sizes(_symbols(size).pop(), factor, 1 + micro_batch.sequences)

    def storages(self, node: Any) -> dict[int, int]:
        """Return the storages of a node's value -> bytes; of a view, those of the view."""
        values = node.meta.get("val") if isinstance(node, fx.Node) else None
        tensors = [v for v in (values if isinstance(values, tuple | list) else [values]) if isinstance(v, Tensor)]
        return {tensor.untyped_storage()._cdata: self._bytes(tensor) for tensor in tensors}

    def _bytes(self, value: Tensor) -> int:
        return round(math.prod(map(self._size, value.shape)) * value.dtype.itemsize)

    def _size(self, size: int | torch.SymInt) -> float:
        if not isinstance(size, torch.SymInt) or symbol_name(size) is None:
            return int(size)
        return int(size.node.hint) * self.factor if self.tokens in _symbols(size) else self.bounds


def _symbols(size: int | torch.SymInt) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w*", symbol_name(size) or ""))


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def _nodes(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == op]


def _results(graph: fx.GraphModule) -> list[Any]:
    return list(_nodes(graph, "output")[0].args[0])  # type: ignore[arg-type]


def _most(graph: fx.GraphModule, sizes: _Sizes) -> int:
    """Return the most that a graph's own values take at once; each goes after its last use, results stay."""
    nodes = list(graph.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    last: dict[int, int] = {}
    foreign: set[int] = set()
    for node in nodes:
        for key in sizes.storages(node):
            last[key] = max([last.get(key, 0), order[node], *(order[user] for user in node.users)])
            if node.op in ("placeholder", "get_attr"):
                foreign.add(key)
    ending: dict[int, list[int]] = {}
    for key, at in last.items():
        ending.setdefault(at, []).append(key)
    alive: dict[int, int] = {}
    most = 0
    for i, node in enumerate(nodes):
        for key, size in sizes.storages(node).items():
            if key not in foreign:
                alive.setdefault(key, size)
        most = max(most, sum(alive.values()))
        for key in ending.get(i, ()):
            alive.pop(key, None)
    return most


# One iteration.

Storage = tuple[str, str]  # the attribute of Memory that it belongs to, and a name


class _Alive:
    """Values and the storages that each of them keeps."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self._sizes: dict[Storage, int] = {}
        self._users: Counter[Storage] = Counter()
        self._values: dict[str, tuple[Storage, ...]] = {}

    def __contains__(self, value: str) -> bool:
        return value in self._values

    def add(self, value: str, part: str, size: int, *shared: str) -> None:
        """Let a value begin, with a storage of its own, and keeping those of some other values too."""
        self._sizes[part, value] = size
        storages = ((part, value), *(s for other in shared for s in self._values.get(other, ())))
        self._values[value] = storages
        for storage in storages:
            self._users[storage] += 1
            if self._users[storage] == 1:
                self.sums[storage[0]] += self._sizes[storage]

    def drop(self, *values: str) -> None:
        """End values; what none is left to keep goes."""
        for value in values:
            for storage in self._values.pop(value, ()):
                self._users[storage] -= 1
                if not self._users[storage]:
                    self.sums[storage[0]] -= self._sizes[storage]


@dataclass(frozen=True)
class _Link:
    """A bucket's exchange as one rank sees it, in bytes: what is copied to be sent, and what is received."""

    outgoing: int
    incoming: int


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
        self._degree = _degree(self._stage, rank) if self._stage else Degree()
        self._batches = micro_batches[self._stage.pipeline] if self._stage else ()
        self._everyones = sum(m.tokens for each in micro_batches for m in each)
        self._blocks = {b.name: b for b in program.blocks}
        self._buckets = {b.name: b for b in program.buckets}
        self._compiled = compiled
        self._known: dict[tuple[object, MicroBatch], Footprint] = {}
        self._in_flight: list[str] = []
        self._alive = _Alive()

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
        link = self._pulled(self._buckets[bucket])
        self._fly(f"pull {bucket}", link.outgoing)
        if held:
            self._alive.add(f"W.{bucket}", "weights", link.incoming)

    def _push(self, bucket: str) -> None:
        link = self._pushed(self._buckets[bucket])
        kept = () if link.outgoing else (f"G.{bucket}",)  # what is not copied is itself the message
        self._fly(f"push {bucket}", link.outgoing + link.incoming, *kept)
        self._alive.drop(f"G.{bucket}")

    def _pulled(self, bucket: Bucket) -> _Link:
        owners, users = home(bucket.size, range(self._ranks)), self._propagation(bucket)
        itemsize = self._program.dtype.itemsize
        if self._ranks == 1 and itemsize == WEIGHT_BYTES:
            return _Link(0, 0)  # the home shard itself
        incoming = users.local_size(self._rank) * itemsize
        shard = owners.local_size(self._rank)
        if is_all_gather(owners, users) and len(owners.ranks) == self._ranks > 1:
            return _Link(0 if itemsize == WEIGHT_BYTES else shard * itemsize, incoming)
        sends, _ = copy(owners, users, self._rank).of(self._rank)
        as_it_is = itemsize == WEIGHT_BYTES and _in_order(sends.src_at, sends.hi - sends.lo, shard)
        return _Link(0 if as_it_is else sends.elements * itemsize, incoming)

    def _pushed(self, bucket: Bucket) -> _Link:
        if self._ranks == 1:
            return _Link(0, 0)  # gradients are added up at home
        users, owners = self._propagation(bucket), home(bucket.size, range(self._ranks))
        sends, receives = reduce(users, owners, self._rank).of(self._rank)
        as_it_is = _in_order(sends.src_at, sends.hi - sends.lo, users.local_size(self._rank))
        straight = _in_order(receives.dst_at, receives.hi - receives.lo, owners.local_size(self._rank))
        return _Link(
            0 if as_it_is else sends.elements * GRADIENT_BYTES, 0 if straight else receives.elements * GRADIENT_BYTES
        )

    def _propagation(self, bucket: Bucket) -> Layout:
        kinds = {p.name: GradientKind.REPLICA for p in bucket.parameters}  # sizes do not depend on them
        return propagation(bucket, self._holders[bucket.name], kinds)

    # Activations.

    def _forward(self, instruction: Instruction) -> Iterator[int]:
        m = instruction.micro_batch
        assert m is not None
        if instruction.target == "aux":
            self._alive.add(f"a.{m}", "activations", self._aux_bytes(self._batches[m]))
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
        yield found.backward
        self._alive.drop(instruction.reads[0])
        for value in instruction.writes:
            if value[0] == "d":
                self._hidden(value, whole=not self._degree.sequence_parallel or self._borders(instruction.target)[0])
            elif value not in self._alive:
                size = self._propagation(self._buckets[value[2:]]).local_size(self._rank)
                self._alive.add(value, "gradients", GRADIENT_BYTES * size if self._ranks > 1 else 0)
        yield found.gradients

    def _hidden(self, value: str, whole: bool = True) -> None:
        size = self._hidden_bytes(int(value.rpartition(".")[2]))
        self._alive.add(value, "activations", size if whole else size // self._degree.tp)

    def _hidden_bytes(self, m: int) -> int:
        first = self._program.templates[self._program.blocks[0].template].graph
        width = int(_results(first)[0].meta["val"].shape[-1])
        return self._batches[m].tokens * width * self._program.dtype.itemsize

    def _borders(self, block: str) -> tuple[bool, bool]:
        """Say whether sequence-parallel ranks take a block's input, or give its output, as a whole: between stages."""
        stage, index = self._stage, self._program.outline.index[block]
        assert stage is not None
        first, last = stage.blocks[0], stage.blocks[1] - 1
        split = self._degree.sequence_parallel
        return split and index == first and bool(stage.previous), split and index == last and bool(stage.following)

    def _footprint(self, block: str, m: int) -> Footprint:
        assert self._stage is not None
        variant = self._compiled(self._blocks[block], self._degree, self._stage.recompute)
        key = (variant, self._batches[m])
        if key not in self._known:
            self._known[key] = footprint(variant, self._degree, self._batches[m])
        return self._known[key]

    def _aux_bytes(self, micro_batch: MicroBatch) -> int:
        graph = self._program.templates[self._program.aux.template].graph
        sizes = _Sizes.of_inputs(_nodes(graph, "placeholder"), 1, micro_batch)
        given = {key for node in _nodes(graph, "placeholder") for key in sizes.storages(node)}
        made = {key: size for node in _results(graph) for key, size in sizes.storages(node).items()}
        return sum(size for key, size in made.items() if key not in given)


def _degree(stage: PlacedStage, rank: int) -> Degree:
    return Degree(len(stage.ranks), stage.ranks.index(rank), stage.sequence_parallel)


def _in_order(at: Ints, length: Ints, size: int) -> bool:
    """Say whether pieces, one after another, are the whole buffer, which then needs no copy."""
    return bool((at == length.cumsum() - length).all()) and int(length.sum()) == size

"""Executor of a RankProgram on one rank for one iteration.

Messages start in program order and run during computation; an instruction waits only for the values in its `after`. The
commit is the last communication, so an update is never applied on only some ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.failure.rank_watch import RankWatch, agreed
from hydragraph.cluster.message_in_flight import Message
from hydragraph.ir.hidden_state import hidden_dtype, hidden_size, loss_dtype
from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program import Program
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.value import Value, ValueKind, aux, bucket_of, gradients, weights
from hydragraph.kernels import exact_sums
from hydragraph.passes.bind import bind_graph
from hydragraph.passes.differentiate import COLLECTIVES, saved_names
from hydragraph.private.argument_trees import tree_leaves
from hydragraph.runtime.buffers import AHEAD, Buffers
from hydragraph.runtime.exchange import Transfer
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.host_copies import CopiedTensors, copy_to_host, storage_address
from hydragraph.runtime.instruction_trace import ExposedSeconds, RankTimes, Timing
from hydragraph.runtime.pending_work import Finish, Pending
from hydragraph.runtime.prepared_programs import Prepared, shard_view
from hydragraph.runtime.rounded_weights import RoundedWeights
from hydragraph.runtime.saved_views import let_go, restored
from hydragraph.runtime.sequence_sums import ScoredSequences
from hydragraph.runtime.speed_probe import ProbeResult
from hydragraph.runtime.state_agreement import ProgressLog
from hydragraph.runtime.streams import DeviceStreams, Mark, streams_of
from hydragraph.runtime.thread_times import ThreadTimes, unknown

_ROW = 1024
# Stream that produces each kind of value; other kinds arrive as messages
_MADE_BY = {
    ValueKind.WEIGHTS: Stream.PULL,
    ValueKind.COPYING: Stream.OFFLOAD,
    ValueKind.FETCHED: Stream.OFFLOAD,
}
# Number of integers that `says` returns
SAYS = 5


@dataclass(frozen=True)
class IterationOutcome:
    """Result of an iteration, equal on every rank.

    Attributes:
        grad_norm: gradient norm; 0 for an evaluation.
        scores: each sequence's log-probability and, if requested, entropy, as fp64 [sequences, 1 or 2] on the CPU;
            empty without scoring.
    """

    loss: float
    grad_norm: float
    finite: bool
    ranks: tuple[RankTimes, ...]
    said: tuple[tuple[int, ...], ...]
    scores: Tensor

    @property
    def alike(self) -> bool:
        marks = {numbers[-1] for numbers in self.said}
        return len(marks) == 1 and -1 not in marks


class ConcurrentWork(Protocol):
    def go_on(self) -> None:
        """Continue the work between instructions, without waiting."""

    def end(self) -> None:
        """Finish after all pushes and before ranks agree to update."""


@dataclass
class _Iteration:
    prepared: Prepared
    batches: Mapping[int, Mapping[str, Tensor]]
    divisor: float
    collectives: Any
    timing: Timing
    aux_buffers: Mapping[str, Tensor]
    scored: ScoredSequences | None
    values: dict[Value, Any] = field(default_factory=dict)
    # Includes outgoing messages
    arriving: dict[Value, Pending | CopiedTensors] = field(default_factory=dict)
    # Pulls for which this rank only sends
    serving: dict[Value, Pending] = field(default_factory=dict)
    pushing: dict[Value, Pending] = field(default_factory=dict)
    pushed: bool = False
    # Shards of weights or gradients, by parameter
    views: dict[Value, dict[str, Tensor]] = field(default_factory=dict)
    # Storages that are not offloaded, by set of saved values
    staying: dict[Value, set[int]] = field(default_factory=dict)
    received: set[Value] = field(default_factory=set)
    # Marks after the device's reads of received values
    consumed: list[Mark] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    sums: dict[Value, list[Tensor]] = field(default_factory=dict)
    largest: Tensor | None = None


class Executor:
    """Executor of prepared programs on one rank.

    Args:
        rounded: 16-bit weights that the optimizer maintains for pulls.
        deterministic: whether sums are exact (`kernels.exact_sums`).

    Attributes:
        probe: called before the commit for `RankTimes.probe`.
    """

    def __init__(
        self,
        program: Program,
        home: HomeState,
        groups: Groups,
        watch: RankWatch,
        device: torch.device,
        streams: DeviceStreams | None = None,
        rounded: RoundedWeights | None = None,
        log: ProgressLog | None = None,
        deterministic: bool = False,
    ) -> None:
        self._exact = deterministic
        self._program = program
        self._home = home
        self._groups = groups
        self._watch = watch
        self._device = device
        self.streams = streams or streams_of(device, groups.world.backend, groups.world.ranks)
        self._rounded = rounded
        self._log = log or ProgressLog()
        self.before: Callable[[Instruction], None] | None = None
        self.probe: Callable[[], ProbeResult] | None = None
        self.beside: ConcurrentWork | None = None
        self._scheduled = ThreadTimes() if device.type == "cpu" else unknown
        self._buffers = Buffers(device, self.streams)
        self._aux = program.templates[program.aux.template]
        self._aux_graph = bind_graph(self._aux.graph, device)
        self._parameters = program.parameters
        places = {template: place for place, template in enumerate(program.kinds)}
        self._kinds = {block.name: places[block.template] for block in program.blocks}
        self._hidden = hidden_size(program)
        self._hidden_dtype = hidden_dtype(program)

    @torch.no_grad()
    def run(
        self,
        prepared: Prepared,
        batches: Mapping[int, Mapping[str, Tensor]],
        divisor: float,
        update: Callable[[float], None],
        aux_buffers: Mapping[str, Tensor],
        timing: Timing,
        says: Callable[[], tuple[int, ...]] = lambda: (0,) * SAYS,
        scored: ScoredSequences | None = None,
    ) -> IterationOutcome:
        """Run one iteration.

        Args:
            batches: this rank's packed micro-batches, by number (`ir.rank_program.Role`).
            update: called with a finite gradient norm.
            says: called while gradients are in flight; returns `SAYS` integers below 2**53 that the commit sends to all
                ranks.
            scored: positions of scored sequences, or None.
        """
        timing.kinds = len(self._program.kinds)
        self._buffers.begin()
        collectives = self._groups.tensor_parallel(prepared.stages)
        self._groups.connect(prepared.program)
        mine = next(iter(collectives.values()), None)
        iteration = _Iteration(prepared, batches, divisor, mine, timing, aux_buffers, scored)
        self._after_last_step()
        self._log.begin()
        try:
            outcome = self._follow(iteration, update, says)
        except BaseException:
            # A copy from the host may still be writing to memory.
            with self.streams.on(Stream.OFFLOAD):
                copied = self.streams.mark()
            self.streams.wait(copied)
            raise
        if timing.spans is not None:
            self.streams.finish()
            timing.end()
        return outcome

    def _follow(
        self, iteration: _Iteration, update: Callable[[float], None], says: Callable[[], tuple[int, ...]]
    ) -> IterationOutcome:
        outcome: IterationOutcome | None = None
        timing = iteration.timing
        for index, instruction in enumerate(iteration.prepared.program.instructions):
            self._watch.at(index)
            if self.before is not None:
                self.before(instruction)
            if self.beside is not None:
                self.beside.go_on()
            for value in instruction.after:
                # Pulls and pushes wait for room in flight, other instructions for values.
                if instruction.op in (Op.PULL, Op.PUSH):
                    self._make_room(iteration, instruction.stream, value)
                else:
                    self._arrive(iteration, value)
            name = instruction_text(instruction) if timing.spans is not None else ""
            with timing.running(name):
                if instruction.op is Op.COMMIT:
                    outcome = self._commit(iteration, says)
                elif instruction.op is Op.UPDATE:
                    assert outcome is not None
                    if outcome.finite and outcome.alike:
                        update(outcome.grad_norm)
                elif instruction.target in self._kinds and instruction.stream is Stream.COMPUTE:
                    with timing.computing(self._kinds[instruction.target], self._waited, self._scheduled):
                        _RUN[instruction.op](self, iteration, instruction)
                else:
                    _RUN[instruction.op](self, iteration, instruction)
        assert outcome is not None
        return outcome

    def drop_buffers(self) -> None:
        self._buffers = Buffers(self._device, self.streams)

    def _waited(self) -> float:
        return self._groups.waited_s

    def _after_last_step(self) -> None:
        # No message may overtake the last step's update, on the compute stream.
        start = self.streams.mark()
        for stream in (Stream.PULL, Stream.PUSH, Stream.P2P):
            with self.streams.on(stream):
                self.streams.wait(start)

    def _arrive(self, it: _Iteration, value: Value) -> None:
        pending = it.arriving.pop(value, None)
        if pending is not None:
            with it.timing.waiting(_MADE_BY.get(value.kind, Stream.P2P), value):
                it.values[value] = pending()

    def _make_room(self, it: _Iteration, stream: Stream, value: Value) -> None:
        arriving = it.arriving.get(value)
        if isinstance(arriving, Pending):
            with it.timing.waiting(stream, value):
                arriving.end()
            return
        under_way = it.serving if stream is Stream.PULL else it.pushing
        pending = under_way.get(value)
        if pending is None:
            return
        # A push ends only after its sums were sent to second owners.
        if pending.follows:
            self._begin_handing(it, value, pending)
        # The compute stream must not wait for this
        with self.streams.on(stream):
            self._end(it, stream, under_way, value)

    def _pull(self, it: _Iteration, instruction: Instruction) -> None:
        name = instruction.target
        exchange = it.prepared.pulls[name]
        with self.streams.on(Stream.PULL):
            bucket = bucket_of(name)
            home = self._home.weights[bucket] if self._rounded is None else self._rounded.of(bucket)
            it.timing.started(weights(name))
            finish = Transfer(exchange, self._groups, self._buffers).pull(home, self._program.dtype)
        under_way = it.arriving if instruction.writes else it.serving
        under_way[weights(name)] = Pending(self.streams, Stream.PULL, finish)

    def _shards(self, it: _Iteration, value: Value) -> dict[str, Tensor]:
        if value not in it.views:
            flat = it.values[value]
            places = it.prepared.shards[value.bucket]
            it.views[value] = {
                name: shard_view(self._parameters[name], flat, place, it.prepared.part)
                for name, place in places.items()
            }
        return it.views[value]

    def _forward(self, it: _Iteration, instruction: Instruction) -> None:
        micro_batch = instruction.batch
        self._end_ready(it, Stream.PULL, it.serving)
        self._buffers.trim()
        batch = it.batches[micro_batch]
        if instruction.target == "aux":
            buffers = [it.aux_buffers[name] for name in self._aux.buffers]
            fields = [batch[name] for name in self._aux.inputs]
            it.values[instruction.writes[0]] = self._aux_graph(*buffers, *fields)
            return
        block = it.prepared.blocks[instruction.target]
        shards = self._weights(it, instruction)
        hidden = next((it.values[value] for value in instruction.reads if value.kind is ValueKind.ACTIVATION), None)
        # Stages exchange whole hidden states, but each rank computes with its own tokens.
        if block.enters and hidden is not None:
            hidden = it.collectives.split(hidden, 1)
        if self._exact and hidden is not None:
            hidden = laid_out(hidden)
        operands: dict[str, Any] = {
            **block.starts,
            COLLECTIVES: it.collectives,
            **batch,
            **block.buffers,
            "hidden": hidden,
        }
        extras = it.values.get(aux(micro_batch))
        if extras is not None:
            operands |= {name: extras[index] for name, index in block.aux.items()}
        operands |= {local: shards[name] for local, name in block.names.items() if name in shards}
        out, *kept = block.variant.forward(*(operands[name] for name in block.variant.inputs))
        if block.leaves:
            out = it.collectives.all_gather(out, 1)
        it.values[instruction.writes[0]] = out
        if len(instruction.writes) > 1:
            it.values[instruction.writes[1]] = let_go(kept, self._streamed(it, instruction))
            if instruction.writes[1] in it.prepared.offloaded:
                # These stay on the device in any case.
                others = tree_leaves([value for name, value in operands.items() if name != "hidden"])
                it.staying[instruction.writes[1]] = {storage_address(x) for x in others if isinstance(x, Tensor)}

    @staticmethod
    def _streamed(it: _Iteration, instruction: Instruction) -> dict[str, Tensor]:
        read = (value for value in instruction.reads if value.kind is ValueKind.WEIGHTS)
        return {value.bucket: it.values[value] for value in read if value.exchange != value.bucket}

    def _weights(self, it: _Iteration, instruction: Instruction) -> dict[str, Tensor]:
        shards: dict[str, Tensor] = {}
        for value in instruction.reads:
            if value.kind is ValueKind.WEIGHTS:
                shards |= self._shards(it, value)
        return shards

    def _backward(self, it: _Iteration, instruction: Instruction) -> None:
        ended = self._end_ready(it, Stream.PULL, it.serving)
        self._hand_on(it)
        block = it.prepared.blocks[instruction.target]
        if ended or block.recompute:
            self._buffers.trim()
        part = block.halves.get(instruction.work, block.variant)
        kept = restored(it.values[instruction.reads[0]], self._streamed(it, instruction))
        shards = self._weights(it, instruction)
        gradients_in = (value for value in instruction.reads if value.kind is ValueKind.ACTIVATION_GRADIENT)
        tangent = next((it.values[value] for value in gradients_in), None)
        # Derivative of the loss with respect to the summed loss
        if tangent is None:
            tangent = torch.full((), 1.0 / it.divisor, dtype=loss_dtype(self._program), device=self._device)
        elif block.leaves:
            tangent = it.collectives.split(tangent, 1)
        if self._exact:
            tangent = laid_out(tangent)
        operands = dict(zip(saved_names(len(kept)), kept, strict=True))
        operands |= {"tangent": tangent, COLLECTIVES: it.collectives}
        arguments = [operands[n] if n in operands else shards[block.names[n]] for n in part.needs]
        for name in part.added:
            arguments += self._total(it, instruction, block.names[name])
        results = part.backward(*arguments)
        # Summing gradients needs most memory, so drop saved values first.
        it.values[instruction.reads[0]] = None
        del kept
        operands.clear()
        arguments.clear()
        count = len(part.gradients)
        if instruction.work is Work.INPUT_GRADIENT:
            it.values[instruction.writes[-1]] = results[count:]
        for name, gradient in zip(part.gradients, results[:count], strict=True):
            if name == "hidden":
                whole = it.collectives.all_gather(gradient, 1) if block.enters else gradient
                it.values[instruction.writes[0]] = whole
            else:
                total, beta = self._total(it, instruction, block.names[name])
                total.add_(gradient) if beta else total.copy_(gradient)
        passed = instruction.writes[0]
        if passed.kind is ValueKind.ACTIVATION_GRADIENT and passed not in it.values:
            # Zeros: the loss depends on earlier blocks only through a tied weight.
            tokens = it.batches[passed.micro_batch]["input_ids"].shape[1]
            split = 1 if block.enters or not it.prepared.part.sequence_parallel else it.prepared.part.tp
            shape = (1, tokens // split, self._hidden)
            it.values[passed] = torch.zeros(shape, dtype=self._hidden_dtype, device=self._device)
        if self._exact:
            self._settle(it)

    def _settle(self, it: _Iteration) -> None:
        # Move these gradients to exact sums; the next backward takes new buffers.
        for value in [value for value in it.values if value.kind is ValueKind.GRADIENTS]:
            written = it.values.pop(value)
            it.views.pop(value, None)
            sums = self._sums(it, value)
            for name, (at, length) in it.prepared.shards[value.bucket].items():
                if name in it.added:
                    here = slice(at, at + length)
                    largest = exact_sums.add([part[here] for part in sums], written[here])
                    it.largest = largest if it.largest is None else torch.maximum(it.largest, largest)
                    it.added.discard(name)
            self._buffers.give(written)

    def _sums(self, it: _Iteration, value: Value) -> list[Tensor]:
        if value not in it.sums:
            size = it.prepared.pushes[value.exchange].source
            it.sums[value] = [self._buffers.take(size, torch.float64).zero_() for _ in exact_sums.GRIDS]
        return it.sums[value]

    def _offload(self, it: _Iteration, instruction: Instruction) -> None:
        (value,) = instruction.reads
        host, leaving = instruction.writes
        kept = it.values[value]
        computed = self.streams.mark()
        with self.streams.on(Stream.OFFLOAD):
            self.streams.wait(computed)
            it.timing.started(leaving)
            it.values[host] = copy_to_host(kept, it.staying.pop(value))
            it.arriving[leaving] = CopiedTensors(self.streams, self.streams.mark(), kept)

    def _fetch(self, it: _Iteration, instruction: Instruction) -> None:
        (host,) = instruction.reads
        (back,) = instruction.writes
        room = it.values[host].room(self._device)
        free = self.streams.mark()
        with self.streams.on(Stream.OFFLOAD):
            self.streams.wait(free)
            it.timing.started(back)
            kept = it.values[host].fetch(room)
            it.arriving[back] = CopiedTensors(self.streams, self.streams.mark(), kept)

    def _total(self, it: _Iteration, backward: Instruction, name: str) -> tuple[Tensor, float]:
        """Return a parameter's gradient buffer, and the factor of its content: first 0.0, then 1.0."""
        bucket = self._home.pieces[name].bucket
        summed = (value for value in backward.writes if value.kind is ValueKind.GRADIENTS)
        value = next(value for value in summed if value.bucket == bucket)
        if value not in it.values:
            it.values[value] = self._gradient_buffer(it, value)
        beta = float(name in it.added)
        it.added.add(name)
        return self._shards(it, value)[name], beta

    def _gradient_buffer(self, it: _Iteration, value: Value) -> Tensor:
        if value.bucket in it.prepared.at_home:
            return self._home.gradients[value.bucket]
        return self._buffers.take(it.prepared.pushes[value.exchange].source)

    def _send(self, it: _Iteration, instruction: Instruction) -> None:
        (value,) = instruction.reads
        (on_its_way,) = instruction.writes
        tensor = it.values[value].contiguous()
        computed = self.streams.mark()
        with self.streams.on(Stream.P2P), self._watch.communicating():
            self.streams.wait(computed)
            it.timing.started(on_its_way)
            message = self._groups.send(tensor, instruction.partner, message_tag(value))
        it.arriving[on_its_way] = self._pending(message, tensor)

    def _pending(self, message: Message, tensor: Tensor) -> Pending:

        def finish() -> Tensor:
            self._groups.wait(message)
            return tensor

        # The message stream must not wait: the peer may need the next message first.
        return Pending(self.streams, Stream.COMPUTE, Finish(finish, message), at_once=False)

    def _receive(self, it: _Iteration, instruction: Instruction) -> None:
        (value,) = instruction.writes
        tokens = it.batches[value.micro_batch]["input_ids"].shape[1]
        it.consumed = [mark for mark in it.consumed if not self.streams.passed(mark)]
        # The device may still read values that this rank has freed
        if len(it.consumed) >= AHEAD:
            self.streams.reach(it.consumed.pop(0))
        it.received.add(value)
        with self.streams.on(Stream.P2P), self._watch.communicating():
            tensor = torch.empty((1, tokens, self._hidden), dtype=self._hidden_dtype, device=self._device)
            it.timing.started(value)
            message = self._groups.receive(tensor, instruction.partner, message_tag(value))
        it.arriving[value] = self._pending(message, tensor)

    def _push(self, it: _Iteration, instruction: Instruction) -> None:
        if self._exact:
            self._push_exact(it, instruction)
            return
        name = instruction.target
        value = gradients(name)
        total = it.values.get(value)
        if total is None and value in instruction.reads:
            total = self._gradient_buffer(it, value)
        home = self._home.gradients[value.bucket]
        if total is None:
            total = home.new_empty(0)
        else:
            it.values[value] = total
            # The buffer is uninitialized where no backward wrote.
            for parameter, shard in self._shards(it, value).items():
                if parameter not in it.added:
                    shard.zero_()
            # The bucket's next push uses another buffer
            if total is not home:
                it.added.difference_update(it.prepared.shards[value.bucket])
        it.values.pop(value, None)
        it.views.pop(value, None)
        transfer = Transfer(it.prepared.pushes[name], self._groups, self._buffers)
        handing = it.prepared.handings.get(name)
        adds = name in it.prepared.adds
        push = partial(transfer.push, total, home, handing, self._program.push_dtype, adds)
        self._start(it, value, [total], push)

    def _push_exact(self, it: _Iteration, instruction: Instruction) -> None:
        value = gradients(instruction.target)
        home = self._home.gradients[value.bucket]
        transfer = Transfer(it.prepared.pushes[instruction.target], self._groups, self._buffers)
        none = [home.new_empty(0, dtype=torch.float64) for _ in exact_sums.GRIDS]
        sums = self._sums(it, value) if value in instruction.reads else none
        it.sums.pop(value, None)
        handing = it.prepared.handings.get(instruction.target)
        self._start(it, value, sums, partial(transfer.exact_push, sums, home, handing))

    def _start(self, it: _Iteration, value: Value, sent: Sequence[Tensor], push: Callable[[], Finish]) -> None:
        self._hand_on(it)
        self._end_ready(it, Stream.PUSH, it.pushing)
        computed = self.streams.mark()
        with self.streams.on(Stream.PUSH), self._watch.communicating():
            self.streams.wait(computed)
            for tensor in sent:
                self.streams.hold(tensor)
            it.timing.started(value)
            it.pushing[value] = Pending(self.streams, Stream.PUSH, push())
            it.pushed = True

    def _hand_on(self, it: _Iteration, wait: bool = False) -> None:
        for value, pending in list(it.pushing.items()):
            # Second exchanges start in the order of pushes on all ranks, so a late one
            # delays later ones.
            if pending.follows:
                if not (wait or pending.arrived):
                    break
                self._begin_handing(it, value, pending)

    def _begin_handing(self, it: _Iteration, value: Value, pending: Pending) -> None:
        earlier = [other for other in it.pushing if other.bucket == value.bucket and other != value]
        for other in earlier:
            self._end(it, Stream.PUSH, it.pushing, other)
        with it.timing.waiting(Stream.PUSH, value, more=True), self._watch.communicating():
            pending.go_on()

    def _end_ready(self, it: _Iteration, stream: Stream, under_way: dict[Value, Pending]) -> bool:
        before = len(under_way)
        # If the device queues waits, only the commit must wait.
        for value in [] if self.streams.queued else list(under_way):
            if not under_way[value].ready:
                break
            self._end(it, stream, under_way, value)
        return len(under_way) < before

    @staticmethod
    def _end(it: _Iteration, stream: Stream, under_way: dict[Value, Pending], value: Value) -> None:
        with it.timing.waiting(stream, value):
            under_way.pop(value)()

    def _free(self, it: _Iteration, instruction: Instruction) -> None:
        for value in instruction.reads:
            freed = it.values.pop(value, None)
            it.views.pop(value, None)
            if value in it.received:
                it.consumed.append(self.streams.mark())
            if value.kind is ValueKind.WEIGHTS:
                self._buffers.give(freed)

    def _commit(self, it: _Iteration, says: Callable[[], tuple[int, ...]]) -> IterationOutcome:
        if self.probe is not None:
            it.timing.probed(self.probe())
        said = says()
        self._hand_on(it, wait=True)
        for stream, under_way in ((Stream.PULL, it.serving), (Stream.PUSH, it.pushing)):
            for value in list(under_way):
                self._end(it, stream, under_way, value)
        with self._watch.waiting():
            self.streams.finish()
        world = self._groups.world
        mine = it.timing.times
        row = [*said, mine.seconds, *astuple(mine.exposed), mine.ran, mine.queued, mine.probe, *mine.own]
        results = {value.micro_batch: loss for value, loss in it.values.items() if value.kind is ValueKind.LOSS}
        # A stage's ranks have equal losses; only the first counts them.
        results = results if it.prepared.part.index == 0 else {}
        scores = self._scores(it, results)
        losses = list(results.values()) if it.scored is None else [-scores[:, 0].sum()]
        add = self._exact_totals if self._exact else self._plain_totals
        parts, scale = add(it, losses)
        at = parts.numel()
        # Other ranks' rows are 0, so the sum over ranks gathers all rows.
        rows = torch.zeros(world.ranks, len(row), dtype=torch.float64, device=self._device)
        rows[world.rank] = torch.tensor(row, dtype=torch.float64)
        totals = torch.cat([parts.flatten(), rows.flatten(), scores.flatten()])
        # Some ranks may update as soon as the commit ends. From then on, all others must be able to, even if a rank
        # is lost.
        if self.beside is not None:
            self.beside.end()
        self._log.gathered()
        totals = self._groups.reduce_to_host(Channel.COMMIT, totals)
        loss, square = totals[:at].view(2, -1).sum(1).tolist()
        square /= scale**2
        end = at + rows.numel()
        by_rank = totals[at:end].view(rows.shape).tolist()
        said_by = tuple(tuple(map(int, rank_row[:SAYS])) for rank_row in by_rank)
        # As in `row`: seconds, 4 exposed times, ran, queued, probe, then the times of templates.
        spent = (rank_row[SAYS:] for rank_row in by_rank)
        ranks = tuple(
            RankTimes(times[0], ExposedSeconds(*times[1:5]), tuple(times[8:]), *times[5:8]) for times in spent
        )
        finite = bool(torch.isfinite(totals).all())
        return IterationOutcome(loss / it.divisor, square**0.5, finite, ranks, said_by, totals[end:].view(scores.shape))

    def _scores(self, it: _Iteration, results: Mapping[int, Tensor]) -> Tensor:
        if it.scored is None:
            return torch.zeros(0, 1, dtype=torch.float64, device=self._device)
        return it.scored.sums({m: (rows, it.batches[m]["cu_seqlens"]) for m, rows in results.items()}, self._device)

    def _plain_totals(self, it: _Iteration, losses: Sequence[Tensor]) -> tuple[Tensor, float]:
        totals = torch.zeros(2, 1, dtype=torch.float64, device=self._device)
        for loss in losses:
            totals[0] += loss.double()
        if it.pushed:
            totals[1] += sum(square_sum(gradient) for gradient in self._home.counted)
        return totals, 1.0

    def _exact_totals(self, it: _Iteration, losses: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Return parts [2, 3] and a scale. Summed over ranks, row 0 is the loss; row 1 is the squared norm * scale**2.

        Raises:
            FloatingPointError: a gradient is too large for exact sums; raised on all ranks.
        """
        totals = torch.zeros(2, len(exact_sums.SQUARE_GRIDS), dtype=torch.float64, device=self._device)
        for loss in losses:
            totals[0, : len(exact_sums.LOSS_GRIDS)] += exact_sums.split(loss, exact_sums.LOSS_GRIDS)
        if not it.pushed:
            return totals, 1.0
        counted = self._home.counted
        most = torch.stack([exact_sums.largest(counted, self._device), torch.zeros_like(totals[0, 0])])
        if it.largest is not None:
            most[1] = it.largest
        of_home, added = self._groups.reduce_to_host(Channel.COMMIT, most, ReduceOp.MAX).tolist()
        if added > exact_sums.LARGEST and math.isfinite(of_home):
            raise agreed(
                FloatingPointError(
                    f"a sequence's gradient has a norm of {added:.4g}, but deterministic sums allow at most "
                    f"{exact_sums.LARGEST:.4g}: no weight was updated; lower the learning rate, or train without "
                    "deterministic"
                )
            )
        scale = exact_sums.scale_of(of_home)
        totals[1] = exact_sums.squares(counted, scale, self._device)
        return totals, scale


_RUN: dict[Op, Callable[[Executor, _Iteration, Instruction], None]] = {
    Op.PULL: Executor._pull,
    Op.FORWARD: Executor._forward,
    Op.BACKWARD: Executor._backward,
    Op.OFFLOAD: Executor._offload,
    Op.FETCH: Executor._fetch,
    Op.SEND: Executor._send,
    Op.RECEIVE: Executor._receive,
    Op.PUSH: Executor._push,
    Op.FREE: Executor._free,
}


def laid_out(value: Tensor) -> Tensor:
    """Return a value with a received tensor's strides, which affect the order of kernels' sums."""
    if value.is_contiguous() and not value.storage_offset():
        return value
    return value.clone(memory_format=torch.contiguous_format)


def square_sum(values: Tensor) -> Tensor:
    """Return the 0-d fp64 sum of squares of a 1-D fp32 tensor, summed in fp32 within rows and in fp64 over rows."""
    cut = len(values) // _ROW * _ROW
    rows = torch.linalg.vector_norm(values[:cut].view(-1, _ROW), dim=1)
    total: Tensor = rows.double().square().sum() + values[cut:].double().square().sum()
    return total


def message_tag(value: Value) -> int:
    return 2 * value.micro_batch + (value.kind is ValueKind.ACTIVATION_GRADIENT)

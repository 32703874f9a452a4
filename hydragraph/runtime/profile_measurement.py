"""Measurement of a profile: median times of templates (graphs that equal blocks share).

Each template is measured for each kind of stage and micro-batch, with its real collectives, while all groups of ranks
run simultaneously, as in training. A stage takes the sum of its templates' times.
"""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist, median, stdev
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cost.block_pieces import AUX, BlockPiece, PricedDevice
from hydragraph.cost.curves import ZERO
from hydragraph.cost.datasheet import reaches_of
from hydragraph.cost.graph_footprint import aux_lines, held_by
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.reach import AttentionReach
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.packed_batch import DropoutNumbers, pack
from hydragraph.frontend.packed_inputs import own_fields
from hydragraph.ir.hidden_state import hidden_dtype, hidden_size, loss_dtype
from hydragraph.ir.placeholders import DROPOUT_BLOCK
from hydragraph.ir.program import Block, Program
from hydragraph.passes.bind import bind_graph
from hydragraph.passes.compile_with_inductor import choose_backend
from hydragraph.passes.differentiate import COLLECTIVES, saved_names
from hydragraph.passes.variants import Variants, local_parameters, vocabulary_starts
from hydragraph.runtime import profile_fitting
from hydragraph.runtime.control_groups import memory_limit
from hydragraph.runtime.executor import square_sum
from hydragraph.runtime.link_measurement import SIZES, round_trip
from hydragraph.runtime.profile_fitting import Lengths, MeasuredTemplate, Measurements
from hydragraph.runtime.streams import synchronise
from hydragraph.runtime.type_splits import split_types
from hydragraph.spec import workload
from hydragraph.spec.stage_kind import StageKind, StagePart

# Elements of the shards whose update is timed
UPDATED = (1 << 16, 1 << 21)
CHAIN = 4
# A measurement stops below this relative standard error
PRECISE = 0.01
# Fraction of memory usable despite fragmentation
USABLE = 0.9

Progress = Callable[[int, int, str], None]  # done, total, description
# A forward function, which returns the backward function.
_Run = Callable[[dict[str, Tensor], Sequence[Tensor]], Callable[[], None]]


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """Model to measure.

    Attributes:
        vocabulary: exclusive upper bound of token ids.
        positions: exclusive upper bound of position ids, or None; ids repeat in longer sequences.
        type: device type, or "" for the device's own name.
    """

    program: Program
    buffers: Mapping[str, Tensor]
    vocabulary: int
    positions: int | None = None
    backend: str | None = None
    type: str = ""


@dataclass(frozen=True)
class MeasureSettings:
    """Measurement settings.

    Attributes:
        schemes: each needs only the ranks of one stage.
        repeats: maximum repetitions of each measurement after a warm-up.
        points: number of token counts, from longest / 64 to longest.
    """

    schemes: tuple[Scheme, ...]
    kinds: tuple[StageKind, ...] = ()
    longest: int = 4096
    repeats: int = 5
    points: int = 6

    @property
    def every_kind(self) -> tuple[StageKind, ...]:
        return tuple(dict.fromkeys([*(StageKind(tp) for tp, _ in self.schemes), *self.kinds]))

    @property
    def micro_batches(self) -> tuple[Lengths, ...]:
        """Micro-batches to measure; every tensor-parallel degree divides their tokens."""
        multiple = 4 * math.lcm(*(kind.tp for kind in self.every_kind))
        return profile_fitting.micro_batches(profile_fitting.token_counts(self.longest, multiple, self.points))

    def check(self, program: Program, ranks: int) -> None:
        for tp, pp in self.schemes:
            if tp > ranks:
                raise ValueError(
                    f"scheme tp{tp}pp{pp} needs {tp} ranks for one stage, but there are {ranks}: add ranks"
                )
            if pp > program.layers:
                raise ValueError(f"scheme tp{tp}pp{pp} has {pp} stages for {program.layers} layers: use fewer stages")
        for kind in self.every_kind:
            if kind.tp > ranks or not program.allows(kind.tp):
                heads = " or ".join(map(str, sorted(set(program.heads))))
                raise ValueError(
                    f"tensor-parallel degree {kind.tp} does not fit {ranks} ranks and {heads} query heads: "
                    "use a degree that divides the heads and is at most the number of ranks"
                )


@dataclass(frozen=True)
class DevicePlace:
    """Node and type of a device; ranks of a measured stage have equal places."""

    node: str
    type: str


def stages_measured_at_once(places: Sequence[DevicePlace], tp: int) -> tuple[tuple[int, ...], ...]:
    """Divide each place's ranks, in order, into groups of `tp`; the rest are in no group."""
    stages: list[tuple[int, ...]] = []
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        stages += [tuple(ranks[first : first + tp]) for first in range(0, len(ranks) - tp + 1, tp)]
    return tuple(stages)


def measure(
    subject: MeasuredModel, settings: MeasureSettings, groups: Groups, progress: Progress | None = None
) -> Profile:
    """Measure a profile of one device type; all ranks call this and get the same profile.

    Raises:
        ValueError: the settings do not fit the model or the ranks.
    """
    place = DevicePlace("", groups.gather(subject.type or type_name(groups.world.device))[0])
    return measure_types(subject, settings, groups, progress, [place] * groups.world.ranks)[0]


def measure_types(
    subject: MeasuredModel,
    settings: MeasureSettings,
    groups: Groups,
    progress: Progress | None,
    places: Sequence[DevicePlace],
    messages: Sequence[tuple[int, float]] | None = None,
    split: bool = False,
) -> tuple[Profile, tuple[str, ...]]:
    """Measure all device types; return one profile and the ranks' types.

    Args:
        messages: measured (bytes, seconds) of messages.
        split: whether to split types whose devices' times differ.
    """
    program = subject.program
    world = groups.world
    settings.check(program, max(Counter(places).values()))
    devices = _devices(subject, groups, places)
    device = devices[places[world.rank].type]
    tell = progress or (lambda done, total, what: None)
    representatives = {block.template: block for block in program.blocks}
    # One timing per template and kind of stage, in equal order on all ranks.
    timings: list[_Timing] = []
    for kind in settings.every_kind:
        bench = Bench(subject, kind, groups, places, device)
        rows = bench.that_fit(settings.micro_batches, list(representatives.values()))
        timings += [bench.timing(block, rows) for block in [*representatives.values(), program.aux]]
    total = len(timings) + settings.repeats + 2
    # A timing's repetitions are spread over time, so that a disturbance affects only one.
    # Precise timings are not repeated.
    left = timings
    for turn in range(settings.repeats + 1):
        if turn:
            tell(len(timings) + turn - 1, total, f"repetition {turn} of at most {settings.repeats}")
        for number, timing in enumerate(left):
            if not turn:
                tell(number, total, f"{timing.bench.kind.text} {timing.block.name}")
            timing.repeat()
        if turn:
            left = [timing for timing in left if timing.error >= PRECISE]
        if not left:
            break
    if split:
        types = _split(program, timings, places)
        timings = [timing.divided(types) for timing in timings]
        places = [replace(place, type=name) for place, name in zip(places, types, strict=True)]
    types = tuple(place.type for place in places)
    # measurements: device type -> kind of stage -> times by template.
    measurements: dict[str, dict[StageKind, Measurements]] = {name: {} for name in types}
    for timing in timings:
        template = AUX if timing.block is program.aux else timing.block.template
        for name in timing.stages:
            of_kind = measurements[name].setdefault(timing.bench.kind, Measurements(timing.rows[name], {}))
            of_kind.times[template] = timing.of(name)
    tell(total - 2, total, "messages")
    if messages is None:
        messages = _messages(groups, settings.repeats)
    tell(total - 1, total, "update")
    update = _update(groups, settings.repeats, types)
    commit = _commit(groups, settings.repeats, types)
    tell(total, total, "")
    # Communicators use memory, so measure it again.
    devices = _devices(subject, groups, places)
    profiles = []
    for name, by_kind in measurements.items():
        profiles.append(
            profile_fitting.fit_profile(
                f"{program.model} in {str(program.dtype).removeprefix('torch.')} on {devices[name].name}",
                [block.template for block in program.blocks],
                [scheme for scheme in settings.schemes if StageKind(scheme[0]) in by_kind],
                devices[name],
                by_kind,
                messages,
                type=name,
                sizes=ModelSizes.of(program),
                update=update[name],
                commit_s=commit[name][0],
                norm_s=commit[name][1],
            )
        )
    return Profile.merge(profiles), types


def _split(program: Program, timings: Sequence[_Timing], places: Sequence[DevicePlace]) -> tuple[str, ...]:
    counts = Counter(block.template for block in program.blocks)
    plain = [timing for timing in timings if timing.bench.kind == StageKind(1)]
    by_rank = [
        [timing.seconds(rank, counts[timing.block.template] or 1) for timing in plain] for rank in range(len(places))
    ]
    return split_types(
        [place.node for place in places],
        [place.type for place in places],
        [sum(seconds for seconds, _ in each) for each in by_rank],
        [math.hypot(*(error for _, error in each)) for each in by_rank],
    )


def _devices(subject: MeasuredModel, groups: Groups, places: Sequence[DevicePlace]) -> dict[str, PricedDevice]:
    by_type: dict[str, list[tuple[str, float]]] = {}
    names = groups.gather(_name(groups.world.device))
    for place, name, memory in zip(places, names, device_memories(groups), strict=True):
        by_type.setdefault(place.type, []).append((name, memory))
    size = subject.program.dtype.itemsize
    return {
        type_: PricedDevice(f"{len(devices)} x {devices[0][0]}", min(memory for _, memory in devices), size)
        for type_, devices in by_type.items()
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def type_name(device: torch.device) -> str:
    """Return a device's type, such as nvidia-h100-80gb-hbm3 or x86-64."""
    return re.sub(r"[^a-z0-9]+", "-", _name(device).lower()).strip("-") or device.type


def host_memory() -> int:
    """Return the bytes of host memory that this process may use."""
    return int(min(memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def device_memories(groups: Groups) -> list[float]:
    """Return each rank's share of its host's or GPU's memory, excluding contexts and communicators."""
    here = socket.gethostname()
    free = host_memory()
    reserved = 0
    device = groups.world.device
    if device.type == "cuda":
        here = str(torch.cuda.get_device_properties(device).uuid)
        free = torch.cuda.mem_get_info(device)[0]
        reserved = torch.cuda.memory_reserved(device)
    return [USABLE * share for share in memory_shares(groups.gather((here, free, reserved)))]


def memory_shares(reports: Sequence[tuple[str, int, int]]) -> list[float]:
    """Return each rank's memory from reports of (place, free bytes, reserved bytes)."""
    shares = {}
    for place in {place for place, _, _ in reports}:
        here = [(free, reserved) for other, free, reserved in reports if other == place]
        shares[place] = (min(free for free, _ in here) + sum(reserved for _, reserved in here)) / len(here)
    return [shares[place] for place, _, _ in reports]


def _messages(groups: Groups, repeats: int) -> list[tuple[int, float]]:
    if groups.world.ranks == 1:
        return []
    talks = groups.world.rank < 2
    return groups.gather([(size, round_trip(groups, (0, 1), size, repeats) if talks else 0.0) for size in SIZES])[0]


def _update(groups: Groups, repeats: int, types: Sequence[str]) -> dict[str, tuple[float, float]]:
    device = groups.world.device

    def stepped(elements: int) -> Callable[[], object]:
        parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
        parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW([parameter]).step

    return _per_element(groups, repeats, stepped, types)


def _commit(groups: Groups, repeats: int, types: Sequence[str]) -> dict[str, tuple[float, float]]:
    device = groups.world.device

    def agreed(elements: int) -> Callable[[], None]:
        gradients = torch.ones(elements, device=device)
        totals = torch.zeros(2 + 4 * groups.world.ranks, dtype=torch.float64, device=device)

        def agree() -> None:
            totals[1] = square_sum(gradients)
            groups.all_reduce(Channel.COMMIT, totals)

        return agree

    return _per_element(groups, repeats, agreed, types)


def _per_element(
    groups: Groups, repeats: int, make: Callable[[int], Callable[[], object]], types: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Time a function for two shard sizes; return (seconds, seconds per element) of each type's slowest rank."""
    device = groups.world.device
    by_size = []
    for elements in UPDATED:
        run = make(elements)
        times = []
        for _ in range(repeats + 1):
            groups.all_reduce(Channel.COMMIT, torch.zeros(1, device=device))
            synchronise(device)
            began = time.perf_counter()
            run()
            synchronise(device)
            times.append(time.perf_counter() - began)
        by_size.append(groups.gather(median(times[1:])))
    by_type = {}
    for name in dict.fromkeys(types):
        small, large = (max(s for s, type_ in zip(each, types, strict=True) if type_ == name) for each in by_size)
        slope = max(0.0, (large - small) / (UPDATED[1] - UPDATED[0]))
        by_type[name] = max(0.0, small - slope * UPDATED[0]), slope
    return by_type


def standard_error(seconds: Sequence[float]) -> float:
    """Return the relative standard error of the median of normally distributed times, ignoring outliers."""
    # The median absolute deviation is 0.67 standard deviations; a median's standard error is
    # sqrt(pi / 2) times a mean's.
    middle = median(seconds)
    deviation = median(abs(each - middle) for each in seconds) / NormalDist().inv_cdf(0.75)
    return math.sqrt(math.pi / 2 / len(seconds)) * deviation / middle if middle > 0 else 0.0


def _bytes_of(piece: BlockPiece) -> tuple[float, float, float]:
    assert piece.held is not None, "a measured block must have known memory"
    # A line is (bytes at 0 tokens, bytes per token).
    lines = piece.held
    constant, kept = map(sum, zip(lines.saved, lines.output, strict=True))
    working = max(0.0, lines.forward[1] - kept, lines.backward[1])
    return kept, working, max(0.0, constant, lines.forward[0] - constant, lines.backward[0])


class Bench:
    """Runner of templates in one kind of stage; ranks without a stage only take part in gathers."""

    def __init__(
        self,
        subject: MeasuredModel,
        kind: StageKind,
        groups: Groups,
        places: Sequence[DevicePlace],
        device: PricedDevice,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._subject = subject
        self._places = places
        self._priced = device
        self._clock = clock
        self._program = subject.program
        self.kind = kind
        self._groups = groups
        self._device = groups.world.device
        rank = groups.world.rank
        tp = kind.tp
        self._stages = stages_measured_at_once(places, tp)
        self._collectives = next(iter(groups.tensor_parallel(self._stages).values()), None)
        own: tuple[int, ...] = next((stage for stage in self._stages if rank in stage), (rank,))
        self._part = StagePart(kind, own.index(rank))
        backend = choose_backend(subject.backend, self._device)
        fused = backend == "inductor"
        cache = VariantCache()
        self._traced = Variants(subject.program, fused_head=fused, added=not fused, cache=cache)
        self._run = Variants(
            subject.program, backend=backend, device=self._device, fused_head=fused, added=True, cache=cache
        )
        self._batches: dict[Lengths, dict[str, Tensor]] = {}
        self._parts = tp if kind.sequence_parallel else 1
        self._several = "cu_seqlens" in self._program.templates[self._program.blocks[-1].template].inputs

    def that_fit(self, rows: Sequence[Lengths], blocks: Sequence[Block]) -> dict[str, tuple[Lengths, ...]]:
        device = self._priced
        most = math.inf
        for block in blocks:
            piece = self._sizes(block)
            kept, working, fixed = _bytes_of(piece)
            # Without weights in the compute dtype and fp32 gradients.
            free = device.memory - fixed - piece.parameters * device.itemsize - 4 * (piece.parameters - piece.frozen)
            most = min(most, free / max(kept + working, 1e-9))
        limits: dict[str, float] = {}
        for place, own in zip(self._places, self._groups.gather(most), strict=True):
            limits[place.type] = min(own, limits.get(place.type, math.inf))
        return {name: tuple(row for row in rows if sum(row) <= limit) for name, limit in limits.items()}

    def timing(self, block: Block, rows: Mapping[str, tuple[Lengths, ...]]) -> _Timing:
        """Return a block's timing; all ranks call this and its methods."""
        aux = block is self._program.aux
        piece = BlockPiece(ZERO, ZERO, held=aux_lines(self._program)) if aux else self._sizes(block)
        stages: dict[str, list[tuple[int, ...]]] = {}
        for stage in self._stages:
            stages.setdefault(self._places[stage[0]].type, []).append(stage)
        reaches = frozenset() if aux else reaches_of(self._program.templates[block.template])
        pieces = self._groups.gather(piece)
        every = max(rows.values(), key=len)
        fitting = len(rows[self._places[self._groups.world.rank].type])
        return _Timing(self, block, rows, every, self._links(piece, every, fitting), pieces, stages, reaches)

    def turn(self, block: Block, rows: Sequence[Lengths], links: Sequence[int]) -> list[Sequence[tuple[float, float]]]:
        runs = [self._aux_run] if block is self._program.aux else self._chain(block, max(links, default=0))
        chains = list(zip(links, rows, strict=True))
        # Warm-up: the first access to new weights' memory is slow.
        for count, row in chains[:1]:
            self.time(runs[:count], row)
        return self._groups.gather([self.time(runs[:count], row) for count, row in chains])

    def _chain(self, block: Block, most: int) -> list[_Run]:
        alike = sum(other.template == block.template for other in self._program.blocks)
        return [self.block_run(block) for _ in range(min(alike, CHAIN, most))]

    def _links(self, piece: BlockPiece, rows: Sequence[Lengths], fitting: int) -> list[int]:
        device = self._priced
        # As in `block_run`: fp32 weights and gradients, and weights in the compute dtype.
        weights = piece.parameters * (2 * 4 + device.itemsize)
        kept, working, fixed = _bytes_of(piece)
        own = [CHAIN] * len(rows)
        for i, row in enumerate(rows[:fitting]):
            left = device.memory - fixed - sum(row) * working
            own[i] = int(left // max(weights + sum(row) * kept, 1.0))
        # A stage's ranks run the same collectives, so their chains must be equally long.
        least = [max(1, min(column)) for column in zip(*self._groups.gather(own), strict=True)]
        return least[:fitting] + [0] * (len(rows) - fitting)

    def time(self, runs: Sequence[_Run], row: Lengths) -> tuple[float, float]:
        """Return forward and backward seconds per block of a chain started by all ranks together."""
        batch = self._batch(row) if runs else {}
        aux = self._aux_values(batch) if runs else ()
        self._groups.all_reduce(Channel.COMMIT, torch.zeros(1, device=self._device))
        if not runs:
            return 0.0, 0.0
        synchronise(self._device)
        began = between = self._clock()
        if self._collectives is not None or self.kind.tp == 1:
            backwards = [run(batch, aux) for run in runs]
            synchronise(self._device)
            between = self._clock()
            while backwards:
                backwards.pop()()
        synchronise(self._device)
        return (between - began) / len(runs), (self._clock() - between) / len(runs)

    def _batch(self, row: Lengths) -> dict[str, Tensor]:
        if row not in self._batches:
            generator = torch.Generator().manual_seed(sum(row))
            ids_of = [torch.randint(0, self._subject.vocabulary, (n,), generator=generator) for n in row]
            sequences = [workload.Sequence(ids, ids, self._own(len(ids))) for ids in ids_of]
            draws = DropoutNumbers(0, range(len(row))) if self._program.drops else None
            batch = pack(sequences, self._parts, self._device, self._several, draws=draws)
            if self._subject.positions is not None:
                batch["position_ids"] %= self._subject.positions
            self._batches[row] = batch
        return self._batches[row]

    def _own(self, tokens: int) -> dict[str, Tensor]:
        fields = own_fields(self._program).items()
        return {name: torch.zeros((tokens, *field.sizes), dtype=field.dtype) for name, field in fields}

    @cached_property
    def _buffers(self) -> dict[str, Tensor]:
        return {name: value.to(self._device) for name, value in self._subject.buffers.items()}

    def _aux_values(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        aux = self._program.aux
        template = self._program.templates[self._program.aux.template]
        arguments = [self._buffers[name] for name in aux.buffers] + [batch[name] for name in template.inputs]
        with torch.no_grad():
            values: Sequence[Tensor] = self._aux_graph(*arguments)
        return values

    @cached_property
    def _aux_graph(self) -> fx.GraphModule:
        return bind_graph(self._program.templates[self._program.aux.template].graph, self._device)

    def _aux_run(self, batch: dict[str, Tensor], aux: Sequence[Tensor]) -> Callable[[], None]:
        self._aux_values(batch)
        return lambda: None

    def _sizes(self, block: Block) -> BlockPiece:
        names = local_parameters(self._program, block, self._program.templates[block.template])
        sizes = {p.name: math.prod(p.local_shape(self.kind.tp, self._part.index)) for p in names.values()}
        frozen = sum(size for name, size in sizes.items() if name not in self._program.learning)
        held = held_by(self._traced.get(block, self._part), self._part)
        return BlockPiece(ZERO, ZERO, sum(sizes.values()), frozen, held=held)

    def block_run(self, block: Block) -> _Run:
        template = self._program.templates[block.template]
        parameters = local_parameters(self._program, block, template)
        variant = self._run.get(block, self._part)
        shapes = {name: p.local_shape(self._part.tp, self._part.index) for name, p in parameters.items()}
        dtype = self._program.dtype
        device = self._device
        tp = self._part.tp
        flat = {name: 0.02 * torch.randn(math.prod(shape), device=device) for name, shape in shapes.items()}
        weights = {name: p.natural(flat[name].to(dtype), tp, self._part.index) for name, p in parameters.items()}
        sums = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        fixed = {local: self._buffers[n] for local, n in zip(template.buffers, block.buffers, strict=True)}
        others = dict(zip((i for i in template.inputs if i.startswith("other.")), block.aux, strict=True))
        hidden = hidden_size(self._program)
        fixed |= vocabulary_starts(variant, parameters, self._part)
        fixed[DROPOUT_BLOCK] = torch.tensor(self._program.number_of(block))
        last = block is self._program.blocks[-1]

        @torch.no_grad()
        def run(batch: dict[str, Tensor], aux: Sequence[Tensor]) -> Callable[[], None]:
            own = {name: aux[index] for name, index in others.items()} | weights
            operands: dict[str, Any] = {**batch, **fixed, **own, COLLECTIVES: self._collectives}
            if "hidden" in variant.inputs:
                shape = (1, batch["input_ids"].shape[1] // self._parts, hidden)
                operands["hidden"] = torch.full(shape, 0.5, dtype=hidden_dtype(self._program), device=device)
            out, *saved = variant.forward(*(operands[name] for name in variant.inputs))
            if last:
                tangent = torch.full((), 1e-3, dtype=loss_dtype(self._program), device=device)
            else:
                tangent = torch.full_like(out, 1e-3)
            values = dict(zip(saved_names(len(saved)), saved, strict=True))
            values |= {"tangent": tangent, COLLECTIVES: self._collectives, **weights}
            totals = [operand for name in variant.added for operand in (sums[name], 1.0)]

            @torch.no_grad()
            def backward() -> None:
                gradients = variant.backward(*(values[name] for name in variant.needs), *totals)
                for name, gradient in zip(variant.gradients, gradients, strict=True):
                    if name in sums:
                        sums[name].add_(gradient)

            return backward

        return run


@dataclass(frozen=True, eq=False)
class _Timing:
    """Repeated timing of a block in one kind of stage.

    Attributes:
        links: number of blocks in each micro-batch's chain.
        turns: (forward, backward) seconds by repetition, rank and micro-batch.
    """

    bench: Bench
    block: Block
    rows: Mapping[str, tuple[Lengths, ...]]
    every_row: tuple[Lengths, ...]
    links: Sequence[int]
    pieces: Sequence[BlockPiece]
    stages: Mapping[str, Sequence[tuple[int, ...]]]
    reaches: frozenset[AttentionReach]
    turns: list[Sequence[Sequence[tuple[float, float]]]] = field(default_factory=list)

    def repeat(self) -> None:
        self.turns.append(self.bench.turn(self.block, self.every_row, self.links))

    @property
    def counted(self) -> Sequence[Sequence[Sequence[tuple[float, float]]]]:
        """All repetitions except the first, or exactly two that agree."""
        return self.turns if len(self.turns) == 2 and self.error < PRECISE else self.turns[1:]

    @property
    def error(self) -> float:
        turns = self.turns if len(self.turns) == 2 else self.turns[1:]
        return max(
            standard_error(
                [median(max(sum(map(sum, turn[rank])) for rank in stage) for stage in stages) for turn in turns]
            )
            for stages in self.stages.values()
        )

    def seconds(self, rank: int, count: int) -> tuple[float, float]:
        # turn[rank][row] is (forward, backward).
        samples = [count * sum(map(sum, turn[rank])) for turn in self.counted]
        error = stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf
        return median(samples), math.sqrt(math.pi / 2) * error

    def divided(self, types: Sequence[str]) -> _Timing:
        stages: dict[str, Sequence[tuple[int, ...]]] = {}
        rows: dict[str, tuple[Lengths, ...]] = {}
        for name in dict.fromkeys(types):
            for type_, every in self.stages.items():
                own = [stage for stage in every if name in {types[rank] for rank in stage}]
                if own:
                    stages[name] = [stage for stage in own if {types[rank] for rank in stage} == {name}] or own
                    rows[name] = self.rows[type_]
        return replace(self, stages=stages, rows=rows)

    def of(self, type_: str) -> MeasuredTemplate:
        stages = self.stages[type_]

        def median_of(row: int, part: Callable[[tuple[float, float]], float]) -> float:
            return median(max(part(turn[rank][row]) for rank in stage) for stage in stages for turn in self.counted)

        rows = range(len(self.rows[type_]))
        seconds = tuple(median_of(row, sum) for row in rows)
        forward = tuple(median_of(row, lambda both: both[0]) for row in rows)
        sizes = [self.pieces[rank] for stage in stages for rank in stage]
        parameters = max(p.parameters for p in sizes)
        largest = BlockPiece(ZERO, ZERO, parameters, min(p.frozen for p in sizes), held=sizes[0].held)
        return MeasuredTemplate(largest, seconds, forward, self.reaches)

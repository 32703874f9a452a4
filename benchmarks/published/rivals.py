"""The systems that the paper compares with, emulated: Megatron-LM, DeepSpeed with Ulysses, HotSPa (8.1, Table 3).

All three pack first-fit decreasing to a fixed length and deal packed sequences to their pipelines in turn. Packed
sequences are not padded, and attention is priced by sequence, both to their advantage.

    Megatron-LM  one homogeneous strategy, 1F1B; its optimizer's all-gather and reduce-scatter priced as pull and push
    DeepSpeed    SP devices share a packed sequence of L tokens (Ulysses): each computes L / SP tokens with whole
                 matrices, and attention over all L for its part of the heads, as under tensor parallelism of that
                 degree. Four all-to-alls per layer forward and four backward move L / SP hidden states each. ZeRO-3
                 gathers every layer's weights for each forward and backward and scatters gradients, so all devices
                 proceed together, micro-batch by micro-batch: a round takes its slowest group's computation, or the
                 traffic if that is longer (to its advantage: all of it hides otherwise). Where Table 3 says AC, the
                 forward is computed once more.
    HotSPa       sequences by length groups, one homogeneous strategy after another; between them weights are sharded
                 again and gradients pushed, at the cluster's bandwidth, without overlap

Their traffic costs are not known, so two values are given: the least, as described above, and the most: ZeRO-3's
traffic never overlaps, and HotSPa takes a second to switch to each strategy, as the paper says ("nearly 2 s" for 7B on
8 GPUs).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from benchmarks.published.llamas import (
    BYTES,
    CARD,
    INNER,
    PER_NODE,
    cluster,
    elements,
    known,
    model_of,
    moved,
    simulated,
    strategy,
)
from benchmarks.published.workload import Lengths, fixed_length, in_turn
from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.cost.traffic import RankLinks, Transfers
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import GradientKind, propagation
from hydragraph.ir.link import copy
from hydragraph.passes.place import place
from hydragraph.spec.assignment import Assignment

SWITCH = 1.0  # seconds for each strategy of an iteration of HotSPa: "nearly 2 s" with two (8.2)
AGAIN = 4 / 3  # computing forward twice: forward is a third of both
GROUPS = (4096, 16_384, 32_768, 65_536, 131_072)  # HotSPa's length groups end here (Appendix F), and beyond it
ACTIVATION = 38  # bytes per element of a layer's hidden state, at tensor-parallel degree 1, of 7B and 13B
RECOMPUTED = 2  # where only a layer's input is kept


@dataclass(frozen=True)
class Spent:
    """Seconds of an iteration.

    Attributes:
        computing: forward and backward.
        moving: added by moving and updating states, with as much overlap as possible.
        unhidden: added without any overlap, and with HotSPa's switching as slow as the paper says.
    """

    computing: float
    moving: float
    unhidden: float

    @property
    def whole(self) -> float:
        """Computing and what is added, at its least."""
        return self.computing + self.moving

    @property
    def most(self) -> float:
        """Computing and what is added, at its most."""
        return self.computing + self.unhidden


class Rival(Protocol):
    """A system on some devices."""

    @property
    def name(self) -> str:
        """Its strategy, in Table 3's words."""
        ...

    def spent(self, lengths: Sequence[int]) -> Spent:
        """Return what an iteration takes."""
        ...


@dataclass(frozen=True)
class Table3:
    """Best strategy of each system as the paper's authors found it (Table 3).

    Attributes:
        sp: DeepSpeed's Ulysses degree.
        megatron: (tp, pp).
        hotspa: (tp, pp) of each length group, the longest first.
        recompute: DeepSpeed's AC.
    """

    sp: int
    megatron: Scheme
    hotspa: tuple[Scheme, ...]
    recompute: bool = False


# (model, devices, context). Table 3 gives HotSPa's second strategy of 7B on 8 devices with 32K as DP4TP2PP2, which
# needs 16 devices, and DP2TP4PP2, which also does; we follow the pattern of all other rows.
TABLE_3 = {
    ("7b", 8, 16_384): Table3(4, (2, 2), ((2, 2), (1, 1))),
    ("7b", 8, 32_768): Table3(8, (4, 2), ((4, 2), (2, 2), (1, 1))),
    ("7b", 16, 16_384): Table3(4, (2, 2), ((2, 2), (1, 1))),
    ("7b", 16, 32_768): Table3(8, (4, 2), ((4, 2), (2, 2), (1, 1))),
    ("13b", 16, 16_384): Table3(4, (4, 1), ((4, 1), (2, 1))),
    ("13b", 16, 32_768): Table3(8, (8, 1), ((8, 1), (4, 1), (2, 1))),
    ("13b", 32, 16_384): Table3(4, (4, 1), ((4, 1), (2, 1))),
    ("13b", 32, 32_768): Table3(8, (8, 1), ((8, 1), (4, 1), (2, 1))),
    ("32b", 32, 16_384): Table3(4, (8, 2), ((8, 2), (4, 4)), recompute=True),
    ("32b", 32, 32_768): Table3(8, (16, 1), ((16, 1), (8, 2), (4, 4)), recompute=True),
    ("32b", 64, 16_384): Table3(4, (8, 2), ((8, 2), (4, 2)), recompute=True),
    ("32b", 64, 32_768): Table3(8, (16, 1), ((16, 1), (8, 2), (4, 2)), recompute=True),
}


class Megatron:
    """One homogeneous strategy with fixed-length packing.

    Args:
        profile: published constants.
        devices: how many.
        scheme: of every pipeline.
        context: most tokens of a packed sequence.
        typical: a mini-batch for which traffic is priced, once.
    """

    def __init__(self, profile: Profile, devices: int, scheme: Scheme, context: int, typical: Sequence[int]) -> None:
        tp, pp = scheme
        count = devices // (tp * pp)
        self.name = f"DP{count}TP{tp}PP{pp}"
        self._pipelines = profile.pipelines([scheme] * count)
        self._context = context
        self._moving = charge(profile, devices, [scheme] * count, self._assignment(typical))

    def _assignment(self, lengths: Sequence[int]) -> Assignment:
        return dealt(fixed_length(lengths, self._context), len(self._pipelines))

    def spent(self, lengths: Sequence[int]) -> Spent:
        """See `Rival`."""
        return Spent(max(self.ends(lengths)), self._moving, self._moving)

    def ends(self, lengths: Sequence[int]) -> list[float]:
        """Return when each pipeline ends."""
        return in_turn(self._pipelines, fixed_length(lengths, self._context))


def dealt(packed: Sequence[Sequence[int]], pipelines: int) -> Assignment:
    """Return packed sequences, one per micro-batch, dealt to pipelines in turn."""
    flat = tuple(n for one in packed for n in one)
    ends = np.cumsum([len(one) for one in packed]).tolist()
    spans = [tuple(range(end - len(one), end)) for end, one in zip(ends, packed, strict=True)]
    return Assignment(tuple(tuple(spans[i::pipelines]) for i in range(pipelines)), flat)


def charge(profile: Profile, devices: int, schemes: Sequence[Scheme], assignment: Assignment) -> float:
    """Return what pull, push, commit and update add to an iteration: it is simulated with them and without."""
    costs = known(profile, devices)
    chosen = strategy(schemes, profile)
    whole = simulated(costs, profile, chosen, assignment).seconds
    return max(0.0, whole - simulated(costs, profile, chosen, assignment, ("pull", "push", "ending")).seconds)


class DeepSpeed:
    """Data parallelism with ZeRO-3 and Ulysses.

    Args:
        profile: published constants.
        devices: how many.
        sp: devices that share a sequence.
        context: most tokens of a packed sequence.
        recompute: forward is computed once more in backward.
    """

    def __init__(self, profile: Profile, devices: int, sp: int, context: int, recompute: bool = False) -> None:
        self.name = f"DP{devices // sp}SP{sp}{'+AC' * recompute}"
        self._groups = devices // sp
        self._context = context
        self._sp = sp
        self._again = AGAIN if recompute else 1.0
        # Linear work is that of one device with the whole model; attention that of as many tensor-parallel devices.
        depth = min(pp for tp, pp in profile.schemes if tp == 1)
        whole = profile.schemes[1, depth].times(depth)
        self._a = profile.schemes[sp, 1].a
        self._b = whole.b / sp
        self._c = whole.c
        model = model_of(profile)
        exchanges = model.layers * (12 if recompute else 8)
        link = INNER if sp <= PER_NODE else CARD
        self._latency = exchanges * link.latency_s
        self._per_token = exchanges * model.hidden * BYTES / sp * (sp - 1) / sp / link.bytes_per_s
        nodes = cluster(devices).devices[-1].node + 1
        # A ring over all devices: each receives all others' parts, and each node through all its cards.
        inside = (devices - 1) / devices / INNER.bytes_per_s
        across = (nodes - 1) / nodes / (PER_NODE * CARD.bytes_per_s)
        self._traffic = 3 * BYTES * elements(profile) * max(inside, across)

    def micro_batch(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a group for one packed sequence, without ZeRO-3's traffic."""
        tokens = sum(lengths)
        work = self._a * sum(n * n for n in lengths) + self._b * tokens + self._c
        return self._again * work + self._per_token * tokens + self._latency

    def spent(self, lengths: Sequence[int]) -> Spent:
        """See `Rival`."""
        each = sorted(map(self.micro_batch, fixed_length(lengths, self._context)), reverse=True)
        rounds = [each[i] for i in range(0, len(each), self._groups)]  # the slowest of each round
        hidden = sum(rounds)
        beyond = sum(max(r, self._traffic) for r in rounds) - hidden
        return Spent(hidden, beyond, len(rounds) * self._traffic)


@dataclass(frozen=True)
class Phase:
    """HotSPa's strategy for one length group.

    Attributes:
        above: sequences have more tokens.
        upto: and at most so many.
        scheme: of every pipeline.
        packed: tokens of a packed sequence, at most.
    """

    above: int
    upto: int
    scheme: Scheme
    packed: int

    def of(self, lengths: Sequence[int]) -> Lengths:
        """Return the sequences of its group."""
        return [n for n in lengths if self.above < n <= self.upto]


class HotSpa:
    """A homogeneous strategy for each length group, one after another.

    Args:
        profile: published constants.
        devices: how many.
        schemes: of each group, the longest first.
        context: the longest sequence.
        tuning: mini-batches for choosing packed lengths: the group's bound, or all that memory holds.
    """

    def __init__(
        self, profile: Profile, devices: int, schemes: Sequence[Scheme], context: int, tuning: Sequence[Lengths]
    ) -> None:
        self._profile = profile
        self._devices = devices
        bounds = bounds_of(context)
        phases = []
        for i, scheme in enumerate(reversed(schemes)):
            upto = bounds[i]
            phase = Phase(bounds[i - 1] if i else 0, upto, scheme, upto)
            most = min(profile.max_len(scheme, devices), context)
            wider = replace(phase, packed=max(upto, most))
            phases.append(min((phase, wider), key=lambda p: sum(self._computing(p, p.of(batch)) for batch in tuning)))
        self.phases = tuple(reversed(phases))
        self.name = ", ".join(f"DP{devices // (tp * pp)}TP{tp}PP{pp}" for tp, pp in schemes)
        self._moving: dict[tuple[Scheme, ...], float] = {}

    def _computing(self, phase: Phase, lengths: Lengths) -> float:
        if not lengths:
            return 0.0
        packed = fixed_length(lengths, phase.packed)
        return max(in_turn(self._pipelines(phase), packed))

    def _pipelines(self, phase: Phase) -> Sequence[PipelineCost]:
        return self._profile.pipelines([phase.scheme] * (self._devices // (phase.scheme[0] * phase.scheme[1])))

    def spent(self, lengths: Sequence[int]) -> Spent:
        """See `Rival`."""
        ran = [phase for phase in self.phases if phase.of(lengths)]
        computing = sum(self._computing(phase, phase.of(lengths)) for phase in ran)
        key = tuple(phase.scheme for phase in ran)
        if key not in self._moving:
            last = ran[-1]
            assignment = dealt(fixed_length(last.of(lengths), last.packed), len(self._pipelines(last)))
            ends = charge(self._profile, self._devices, [last.scheme] * len(self._pipelines(last)), assignment)
            between = itertools.pairwise(key)
            self._moving[key] = ends + sum(resharded(self._profile, self._devices, a, b) for a, b in between)
        moving = self._moving[key]
        return Spent(computing, moving, max(moving, SWITCH * len(ran)) if len(ran) > 1 else moving)


def bounds_of(context: int) -> list[int]:
    """Return where length groups end, for sequences of at most `context` tokens."""
    return [*(bound for bound in GROUPS if bound < context), context]


def resharded(profile: Profile, devices: int, old: Scheme, new: Scheme) -> float:
    """Return the seconds to switch homogeneous strategies: copying weights and pushing gradients, without overlap."""
    costs = known(profile, devices)
    layouts = []
    for scheme in (old, new):
        chosen = strategy([scheme] * (devices // (scheme[0] * scheme[1])), profile)
        holders = dict(place(costs.outline, chosen, [1] * len(chosen.pipelines)).holders)
        layouts.append({b.name: propagation(b, holders[b.name], _replicas(b)) for b in costs.buckets})
    pieces = []
    for bucket in costs.buckets:
        slices = copy(layouts[0][bucket.name], layouts[1][bucket.name]).travelling
        size = np.asarray((slices.hi - slices.lo) * BYTES, dtype=np.float64)
        pieces.append(Transfers(slices.src, slices.dst, size))
    pushed = moved(costs, profile, strategy([old] * (devices // (old[0] * old[1])), profile), Op.PUSH)
    roads = RankLinks(costs.cluster, np.arange(devices))
    return sum(float(roads.passage(together(each, devices)).seconds.max()) for each in (pieces, pushed))


def _replicas(bucket: object) -> dict[str, GradientKind]:
    return {p.name: GradientKind.REPLICA for p in bucket.parameters}


def together(transfers: Sequence[Transfers], ranks: int) -> Transfers:
    """Return the transfers of several buckets as one."""
    code = np.concatenate([t.src * ranks + t.dst for t in transfers])
    pairs, place_of = np.unique(code, return_inverse=True)
    size = np.bincount(place_of, np.concatenate([t.size for t in transfers]), len(pairs))
    return Transfers(pairs // ranks, pairs % ranks, np.asarray(size, dtype=np.float64))


# Tuning for the sweeps, which Table 3 does not cover.


def best_megatron(profile: Profile, devices: int, context: int, tuning: Sequence[Lengths]) -> Megatron:
    """Return the homogeneous strategy that takes the context and computes the mini-batches soonest."""
    able = [s for s in usable(profile, devices) if profile.max_len(s, devices) >= context]
    if not able:
        raise ValueError(f"no published scheme takes {context} tokens on {devices} devices")
    every = [Megatron(profile, devices, scheme, context, tuning[0]) for scheme in able]
    return min(every, key=lambda one: statistics.fmean(one.spent(batch).whole for batch in tuning))


def best_deepspeed(profile: Profile, devices: int, context: int, tuning: Sequence[Lengths]) -> DeepSpeed | None:
    """Return the degree and recomputation that fit and are quickest; None where none fits."""
    model = model_of(profile)
    states = model.layers * model.hidden**2 * model.states / devices
    free = model.device - model.margin - dict(model.gap)[PER_NODE] - states
    every = []
    for sp in (1, 2, 4, 8, 16):
        for recompute in (False, True):
            kept = RECOMPUTED + ACTIVATION / model.layers if recompute else ACTIVATION
            fits = context / sp * model.layers * model.hidden * kept <= free
            if sp <= devices and (sp, 1) in profile.schemes and fits:
                every.append(DeepSpeed(profile, devices, sp, context, recompute))
    return min(every, key=lambda one: statistics.fmean(one.spent(b).whole for b in tuning), default=None)


def best_hotspa(profile: Profile, devices: int, context: int, tuning: Sequence[Lengths]) -> HotSpa:
    """Return the strategy of each length group that computes it soonest."""
    schemes = []
    bounds = bounds_of(context)
    for below, upto in zip([0, *bounds], bounds, strict=False):
        able = [s for s in usable(profile, devices) if profile.max_len(s, devices) >= upto]

        def seconds(scheme: Scheme, below: int = below, upto: int = upto) -> float:
            pipelines = profile.pipelines([scheme] * (devices // (scheme[0] * scheme[1])))
            groups = [[n for n in batch if below < n <= upto] for batch in tuning]
            return sum(max(in_turn(pipelines, fixed_length(group, upto))) for group in groups if group)

        schemes.append(min(able, key=seconds))
    return HotSpa(profile, devices, schemes[::-1], context, tuning)


def usable(profile: Profile, devices: int) -> list[Scheme]:
    """Return the schemes that divide the devices and hold anything."""
    every = [s for s in profile.schemes if devices % (s[0] * s[1]) == 0]
    return [s for s in every if profile.max_len(s, devices) > 0]

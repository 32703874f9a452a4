"""Planning for `strategies: auto`, from measured devices, links and block times.

Noisy times are measured again with more repetitions. If a device type has no usable times, costs of all types come from
operation counts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

from torch import Tensor

from hydragraph.cluster.agreement import from_one
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.rank_memory import ADAMW_STATE_BYTES
from hydragraph.engine.candidate_strategies import Planning, planned_for, runs, sample_of
from hydragraph.engine.discovery import DiscoveredCluster, discover
from hydragraph.engine.profile_cache import (
    CachedProfile,
    equally_changed,
    profile_key,
    recall_profile,
    remember_profile,
)
from hydragraph.ir.hidden_state import hidden_size
from hydragraph.ir.program import Program
from hydragraph.log import doing
from hydragraph.passes.find_field_ranges import field_ranges_of
from hydragraph.passes.variants import Variants
from hydragraph.runtime.device_reports import DeviceReport, report_devices, types_of
from hydragraph.runtime.profile_fitting import TOO_SMALL
from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings, measure_types
from hydragraph.runtime.supported_optimizers import OptimizerFactory, state_bytes
from hydragraph.spec.home import Home
from hydragraph.spec.schedule_names import planned_schedules
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

# (repetitions, token counts) of the first and the second measurement
ATTEMPTS = ((3, 4), (8, 6))
# Minimum tokens of the longest micro-batch, so that attention affects its time
LEAST_TOKENS = 1024
# Maximum time of a block in the longest micro-batch
BLOCK_S = 1.0
FULL = 0.85
# If rank 0's CPU is slower than the fastest by this factor, the fastest's rank plans
SLOW = 0.8
# Assumed sequences per rank, and tokens per sequence, without `lengths`
ASSUMED = (4, 512)


@dataclass(frozen=True)
class PlanningSubject:
    model: MeasuredModel
    home: Home
    state_bytes: int

    @staticmethod
    def of(
        program: Program, buffers: Mapping[str, Tensor], backend: str, home: Home, optimizer: OptimizerFactory | None
    ) -> PlanningSubject:
        limits = field_ranges_of(program)
        vocabulary = min((limit.high for limit in limits if limit.field in ("input_ids", "labels")), default=1)
        positions = min((limit.high for limit in limits if limit.field == "position_ids"), default=None)
        element = state_bytes_of(program, optimizer)
        return PlanningSubject(MeasuredModel(program, buffers, vocabulary, positions, backend), home, element)

    @property
    def program(self) -> Program:
        return self.model.program


def plan_automatically(subject: PlanningSubject, world: World, planning: Planning, preplanned: bool = True) -> Planning:
    """Measure and plan; all ranks call this.

    Args:
        preplanned: if False, only measure.

    Raises:
        Unsupported: no plan fits the devices; raised on all ranks.
        ValueError: hosts have different models or package versions.
    """
    if not planning.lengths:
        count, tokens = ASSUMED
        most = subject.program.positions[0] if subject.program.positions else tokens
        planning = replace(planning, lengths=[[min(tokens, most)] * (count * world.ranks)])
        assumed = f"no lengths were given: planned for {count * world.ranks} sequences of {min(tokens, most)} tokens"
    else:
        assumed = ""
    groups = Groups(world, timedelta(minutes=30))
    try:
        if world.rank == 0:
            doing("measuring devices and links")
        discovered = discover(groups)
        _check_models(subject, discovered, groups)
        # First, measure only plain stages, which is faster. If no plan fits, or it fills memory or
        # streams weights, also measure recomputation and sequence parallelism, and plan
        # again.
        more = False
        while True:
            costs, source = _costs(subject, discovered, groups, planning, more)
            if not preplanned:
                return replace(planning, profile=costs, explanation=_lines(costs, discovered, (), source, assumed))
            try:
                if world.rank == 0:
                    doing("planning")
                where = planning_rank(discovered.reports)
                answer = from_one(world, partial(_planned, subject, costs, planning), where)
            except ValueError:
                if more:
                    raise
            else:
                # Recomputation may be faster than streaming weights or filling the memory.
                if more or (answer.full < FULL and not any(strategy.streams for strategy in answer.strategies)):
                    lines = _lines(
                        costs, discovered, answer.lines, f"{source}; planned in {answer.took_s:.1f} s", assumed
                    )
                    return replace(planning, profile=costs, strategies=answer.strategies, explanation=lines)
            more = True
    finally:
        groups.close()


def measure_newcomers(
    subject: PlanningSubject,
    world: World,
    planning: Planning,
    known: Costs,
    types: Sequence[str],
    newcomers: Sequence[int],
) -> Costs | None:
    """Return new costs if a newcomer's device type is unexpected, otherwise None; all ranks call this.

    Args:
        types: each rank's device type in the `known` costs, or "" if unknown.
    """
    groups = Groups(world, timedelta(minutes=30))
    try:
        found = types_of(report_devices(groups))
        # named: (type now, type in `known`) of earlier ranks. A newcomer fits if earlier ranks of its
        #   type now all have its assumed type in `known`.
        named = {(found[rank], name) for rank, name in enumerate(types) if rank not in newcomers}
        if all([n for f, n in named if f == found[rank]] == [types[rank]] for rank in newcomers):
            return None
        lengths = next(filter(None, groups.gather(planning.lengths)), None)
        more = any(kind.sequence_parallel or kind.recompute for kind in known.profile.pieces)
        costs, source = _costs(subject, discover(groups), groups, replace(planning, lengths=lengths), more)
        _LOG.info("devices of other types joined; new costs: %s", source)
        return costs
    finally:
        groups.close()


def _check_models(subject: PlanningSubject, found: DiscoveredCluster, groups: Groups) -> None:
    programs: list[str] = groups.gather(f"{subject.program.fingerprint}, {subject.program.dtype}")
    for rank, other in enumerate(programs):
        if other != programs[0]:
            hosts = found.reports[rank].host, found.reports[0].host
            raise ValueError(
                f"rank {rank} on {hosts[0]} and rank 0 on {hosts[1]} have different models (programs {other} and "
                f"{programs[0]}): give every host the same config, model files and versions"
            )


def planning_rank(reports: Sequence[DeviceReport]) -> int:
    if not all(report.threads for report in reports):
        # A GPU's speed says little about the machine's CPU
        return 0
    speeds = [report.flops_per_s / report.threads for report in reports]
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    return fastest if speeds[0] < SLOW * speeds[fastest] else 0


@dataclass(frozen=True)
class _Plan:
    strategies: tuple[Strategy, ...]
    lines: tuple[str, ...]
    took_s: float
    full: float


def _planned(subject: PlanningSubject, costs: Costs, planning: Planning) -> _Plan:
    from hydragraph.planner.brief_explanation import brief_explanation  # needs numba

    began = time.monotonic()
    batches = planning.lengths or ()
    schedules = planned_schedules(subject.model.backend or "eager")
    plan = planned_for(subject.program, costs, batches, subject.home, schedules)
    took_s = time.monotonic() - began
    lines = brief_explanation(costs.changed(home=subject.home), Workload(lengths=sample_of(batches)), plan)
    able = tuple(s for s in plan.strategies if runs(subject.program, s, costs.ranks))
    full = max(used / limit for used, limit in zip(plan.memory, plan.limits, strict=True))
    return _Plan(able, lines, took_s, full)


def _lines(costs: Costs, found: DiscoveredCluster, plan: Sequence[str], source: str, assumed: str) -> tuple[str, ...]:
    from hydragraph.planner.brief_explanation import devices_line

    types = [costs.cluster.type_of(rank) for rank in range(costs.ranks)]
    devices = devices_line(costs, types, found.links_text)
    return (devices, *plan, f"costs: {source}", *([assumed] if assumed else []))


def _costs(
    subject: PlanningSubject, found: DiscoveredCluster, groups: Groups, planning: Planning, more: bool
) -> tuple[Costs, str]:
    # Tensor-parallel groups stay within a node, whose size bounds the degree.
    degrees = _degrees(subject.program, max(Counter(found.places).values()))
    kinds = [StageKind(tp, sp, again) for tp in degrees for sp in {False, tp > 1} for again in (False, True)]
    schemes = tuple((tp, 1) for tp in degrees)
    required = max([LEAST_TOKENS, *(n for batch in planning.lengths or () for n in batch)])
    settings = MeasureSettings(schemes, tuple(kinds) if more else (), _longest(subject.program, found, required))
    began = time.monotonic()
    keys = _keys(subject, found, settings, required)
    # Only rank 0 uses the cache: ranks with different caches would take
    # different branches.
    recalled = _of_first(groups, _recalled(keys, found) if groups.world.rank == 0 else None)
    if recalled is not None:
        profile, types = recalled
        return _priced(subject, profile, found.divided(types)), "from the cache"
    attempts = (replace(settings, repeats=repeats, points=points) for repeats, points in ATTEMPTS)
    profile, types = _measured(subject, found, groups, next(attempts))
    # Repeat noisy measurements once, with more repetitions and token counts.
    for attempt in attempts:
        if not any(_is_noisy(type_profile) for type_profile in (profile, *profile.others)):
            break
        profile, types = _measured(subject, found, groups, attempt)
    source = _of_first(groups, f"measured in {time.monotonic() - began:.1f} s")
    every = (profile, *profile.others)
    if not all(type_profile.pieces for type_profile in every):
        reasons = "; ".join(dict.fromkeys(why for type_profile in every for why in type_profile.unfit.values()))
        _LOG.warning("the cost model does not fit the measured times (%s): operations are counted instead", reasons)
        source = f"from operation counts and the speed of matrix products, because {reasons[:80]}"
        profile = datasheet(subject.program, found.cluster, None, degrees, Variants(subject.program).get)
        return _priced(subject, profile, found), source
    if groups.world.rank == 0:
        _remember(keys, found, profile, types)
    return _priced(subject, profile, found.divided(types)), source


def _is_noisy(profile: Profile) -> bool:
    return any(why != TOO_SMALL for why in profile.unfit.values())


def _priced(subject: PlanningSubject, profile: Profile, found: DiscoveredCluster) -> Costs:
    push = subject.program.push_dtype.itemsize
    return Costs(profile, found.cluster, home=subject.home, push_itemsize=push, state_bytes=subject.state_bytes)


def state_bytes_of(program: Program, optimizer: OptimizerFactory | None) -> int:
    """Return the bytes of state per trained element; assume Adam if creating the optimizer fails."""
    names = [parameter.name for bucket in program.buckets if bucket.learns for parameter in bucket.parameters]
    with suppress(Exception):
        return ADAMW_STATE_BYTES if optimizer is None else state_bytes(optimizer, names, program.dtype)
    return ADAMW_STATE_BYTES


def _of_first(groups: Groups, value: T) -> T:
    """Return rank 0's value; ranks may round a fitted value differently."""
    first: list[T | None] = groups.gather(value if groups.world.rank == 0 else None)
    return cast("T", first[0])


def _longest(program: Program, found: DiscoveredCluster, required: int) -> int:
    slowest = min(report.flops_per_s for report in found.reports)
    # Forward and backward take about 6 operations per parameter and token, so a block of
    # `block` parameters at `slowest` FLOP/s takes BLOCK_S for BLOCK_S *
    # slowest / (6 * block) tokens.
    block = max(bucket.size for bucket in program.buckets)
    return max(required, min(4 * hidden_size(program), int(BLOCK_S * slowest / (6 * block))))


def _degrees(program: Program, most: int) -> tuple[int, ...]:
    able = (tp for tp in range(1, most + 1) if program.allows(tp))
    return tuple(tp for tp in able if runs(program, Strategy.parse(f"<tp{tp},pp1>", program.layers), tp))


@dataclass(frozen=True)
class _Keys:
    """Cache keys of a rank's profile: one for all ranks of its device type, one for this rank."""

    shared: str
    own: str


def _keys(subject: PlanningSubject, found: DiscoveredCluster, settings: MeasureSettings, required: int) -> list[_Keys]:
    program = subject.program
    kinds = tuple(kind.text for kind in settings.every_kind)
    model = (program.fingerprint, program.origin, str(program.dtype), subject.model.backend)
    others = (*model, kinds, required)
    together = Counter(found.places)
    nodes = [report.node for report in found.reports]
    keys = []
    for rank, report in enumerate(found.reports):
        # count: most ranks of this type on a node; nodes[:rank].count(...):
        #   the rank's number on its node
        count = max(n for place, n in together.items() if place.type == found.types[rank])
        own = (*others, report.host, nodes[:rank].count(report.node))
        keys.append(_Keys(profile_key(report, count, others), profile_key(report, count, own)))
    return keys


def _recalled(keys: Sequence[_Keys], found: DiscoveredCluster) -> tuple[Profile, tuple[str, ...]] | None:
    shared: dict[str, CachedProfile | None] = {}
    devices = []
    for key, report, name in zip(keys, found.reports, found.types, strict=True):
        # A rank has its own entry only if its device differed from its
        # type (`_remember`).
        device = recall_profile(key.own, report)
        if device is None:
            if name not in shared:
                shared[name] = recall_profile(key.shared, report, name)
            device = shared[name]
        if device is None:
            return None
        devices.append(device)
    # If some devices became slower than others, their profiles' ratio is wrong.
    if not equally_changed(devices):
        return None
    profiles: dict[str, Profile] = {}
    for device in devices:
        profiles.setdefault(device.profile.type, device.profile)
    return Profile.merge([*profiles.values()]), tuple(device.profile.type for device in devices)


def _remember(keys: Sequence[_Keys], found: DiscoveredCluster, profile: Profile, types: Sequence[str]) -> None:
    # new_types: type before the measurement -> types after it, because types may split
    new_types: dict[str, set[str]] = {}
    for old, new in zip(found.types, types, strict=True):
        new_types.setdefault(old, set()).add(new)
    for rank, (key, report) in enumerate(zip(keys, found.reports, strict=True)):
        of_type = replace(profile.of(types[rank]), others=())
        alike = len(new_types[found.types[rank]]) == 1
        if not _is_noisy(of_type) and (not alike or rank == found.types.index(found.types[rank])):
            remember_profile(key.shared if alike else key.own, report, of_type)


def _measured(
    subject: PlanningSubject, found: DiscoveredCluster, groups: Groups, settings: MeasureSettings
) -> tuple[Profile, tuple[str, ...]]:
    def tell(done: int, total: int, what: str) -> None:
        if what and groups.world.rank == 0:
            doing(f"measuring {what}", done + 1, total)

    measured = measure_types(subject.model, settings, groups, tell, found.places, found.links.messages, split=True)
    return _of_first(groups, measured)

"""Metis's planner written out once more, slowly: plain lists and dictionaries, one rank and one layer at a time.

The tested code has tables, cumulative sums and compiled loops; this copy has none of them, so the two are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import numpy as np

from hydragraph.planner.metis import Cluster, DeviceType, Measurement, Plan, Problem, Profile

MIB = 2**20
PIECES = 7


def draw(
    seed: int,
    *,
    most_devices: int = 6,
    most_layers: int = 6,
    types: int = 2,
    batch: int | None = None,
    tight: bool = True,
) -> Problem:
    """Return the problem of a seed: a made-up profile, and uneven nodes of up to so many types."""
    random = np.random.default_rng([17, seed])
    names = ["fast", "slow", "old"][: int(random.integers(1, types + 1))]
    layers = int(random.integers(2, most_layers + 1))
    batch = int(random.choice([2, 4, 6, 8])) if batch is None else batch
    measurements = {}
    sizes = [1 << i for i in range(batch.bit_length())]
    for name in names:
        base = float(random.uniform(1, 4))
        equal = random.random() < 0.5
        for tp in (1, 2, 4):
            for size in sizes:
                faster = tp ** float(random.uniform(0.5, 1.0))
                times = base * (1 + size) / faster * (np.ones(layers) if equal else random.uniform(0.3, 2, layers))
                memory = random.integers(10, 60, layers) * size / tp
                over = float(random.uniform(0.1, 3))
                measurements[name, tp, size] = Measurement(
                    tuple(times.tolist()), float(sum(times.tolist())) + over, tuple(memory.tolist())
                )
    nodes = []
    left = int(random.integers(len(names), most_devices + 1))
    for i, name in enumerate(names):
        most = left - (len(names) - 1 - i)
        devices = most if i == len(names) - 1 else int(random.integers(1, most + 1))
        left -= devices
        nodes += [(name, 1)] * (devices % 2) + [(name, devices // 2 * 2)] * (devices > 1)
    scale = 2.0 if tight else 100.0
    kinds = {
        name: DeviceType(float(random.choice([0.01, 0.1, 50])), float(random.uniform(0.2, scale))) for name in names
    }
    sums = [float(x) for x in random.uniform(1e3, 1e6, 3)]
    profile = Profile(
        measurements,
        (sums[0], sums[1], sums[2]),
        float(random.uniform(1, 20)),
        float(random.uniform(0, 2)),
        hidden=int(random.integers(1, 2000)),
        sequence=4,
        vocabulary=int(random.integers(1, 5000)),
    )
    return Problem(profile, Cluster(kinds, tuple(nodes)), batch, 4)


def can_train(plan: Plan) -> bool:
    every_device = sum(plan.groups) == plan.problem.cluster.devices
    return every_device and sum(plan.layers) == plan.problem.layers and min(plan.layers) > 0


def rank_types(problem: Problem, types: tuple[str, ...]) -> list[str]:
    return [kind for kind in types for _ in range(problem.cluster.counts[kind])]


def shares(problem: Problem, devices: list[str], dp: int, tp: int, samples: int) -> list[int]:
    """Return how many samples each replica of some devices gets."""
    width = len(devices) // dp
    speeds = [1.0 / sum(problem.profile.measurements[devices[i * width], tp, 1].layers_ms) for i in range(dp)]
    total = 0.0
    for speed in speeds:
        total += speed
    exact = [samples * (speed / total) for speed in speeds]
    found = [int(x) for x in exact]
    by_rest = sorted(range(dp), key=lambda i: (-(exact[i] - found[i]), i))
    for i in by_rest[: samples - sum(found)]:
        found[i] += 1
    return found


def digits(number: int) -> list[int]:
    """Return the powers of two that add up to a number, largest first."""
    return [1 << i for i in reversed(range(number.bit_length())) if number >> i & 1]


def stage_ms(problem: Problem, devices: list[str], dp: int, tp: int, batches: int, first: int, end: int) -> float:
    measured = problem.profile.measurements
    if len(set(devices)) == 1:
        return sum(measured[devices[0], tp, problem.batch // dp // batches].layers_ms[first:end])
    width = len(devices) // dp
    return max(
        sum(sum(measured[devices[i * width], tp, digit].layers_ms[first:end]) for digit in digits(samples))
        for i, samples in enumerate(shares(problem, devices, dp, tp, problem.batch // batches))
    )


def price(plan: Plan, stages: int | None = None) -> float:
    """Return the cost of a plan, or of its first stages alone; infinite where something was not measured."""
    try:
        return _price(plan, len(plan.groups) if stages is None else stages)
    except KeyError:
        return math.inf


def _price(plan: Plan, stages: int) -> float:
    problem = plan.problem
    profile = problem.profile
    ranks = rank_types(problem, plan.types)
    times, updates, gradients = [], [], []
    sync = handed = 0.0
    for s in range(stages):
        first, end = plan.partition[s], plan.partition[s + 1]
        start = sum(plan.groups[:s])
        devices = ranks[start : start + plan.groups[s]]
        dp, tp = plan.degrees[s]
        mbs = problem.batch // dp // plan.batches
        times.append(stage_ms(problem, devices, dp, tp, plan.batches, first, end))
        bandwidth = min(problem.cluster.types[kind].bandwidth for kind in devices)
        if s == stages - 1:
            each = [profile.measurements[kind, tp, mbs] for kind in devices]
            sync = plan.batches * max(m.forward_backward_ms - sum(m.layers_ms) for m in each)
        else:
            both = devices + ranks[start + plan.groups[s] : start + plan.groups[s] + plan.groups[s + 1]]
            least = min(problem.cluster.types[kind].bandwidth for kind in both)
            numbers = (
                mbs * profile.sequence * (profile.vocabulary / tp if end == problem.layers - 1 else profile.hidden)
            )
            handed += numbers / (least * MIB)
        ends = [profile.parameters_bytes[0]] * (first == 0) + [profile.parameters_bytes[2]] * (end == problem.layers)
        size = (sum(ends) + profile.parameters_bytes[1] * (end - first - len(ends))) / tp
        gradients.append(2 * (dp - 1) / (dp * bandwidth * MIB) * size)
        updates.append(2 * profile.optimizer_ms / tp * (end - first) / problem.layers)
    pipeline = (plan.batches - 1) * max(times) + sum(times)
    return pipeline + sync + max(updates) + max(gradients) + handed + plan.batches * profile.batch_generator_ms


def divisions(ranks: int, stages: int) -> list[tuple[int, ...]]:
    """Return every way to divide ranks into stages of powers of two that are at least ranks // stages."""
    sizes = [1 << i for i in range(ranks.bit_length()) if 1 << i >= ranks // stages]
    return [row for row in product(sizes, repeat=stages) if sum(row) == ranks]


@dataclass
class Walked:
    """What a walk came to: steps, and plans with what Metis's program takes for their cost."""

    steps: int
    plans: list[tuple[Plan, float]]


def walk(problem: Problem, memory_aware: bool) -> Walked:
    """Walk Metis's search, or the memory-aware one, in the order of the cluster's types."""
    found = Walked(0, [])
    ranks = problem.cluster.devices
    most = min(ranks, problem.layers)
    for number, types in enumerate(permutations(problem.types)):
        stages = [s for s in range(1, most + 1) if divisions(ranks, s)]
        visits = [(s, s) for s in stages]
        if number:
            later = [s for s in stages if s > 1]
            visits = [(s, 1) for s in later[:1]] + [(s, s) for s in later]
        for s, counted in visits:
            for groups in divisions(ranks, s):
                for batches in (b for b in range(problem.batch, 0, -1) if problem.batch % b == 0):
                    _degrees(problem, types, groups, batches, counted, memory_aware, found)
    return found


def _degrees(
    problem: Problem,
    types: tuple[str, ...],
    groups: tuple[int, ...],
    batches: int,
    counted: int,
    memory_aware: bool,
    found: Walked,
) -> None:
    degrees = [(group, 1) for group in groups]
    left: list[float] = []
    lacked: list[float] = []
    steps = 0
    while True:
        attempt = None
        sizes = [problem.batch // dp // batches for dp, _ in degrees]
        largest = max(size for _, _, size in problem.profile.measurements)
        if all(0 < size <= largest for size in sizes) and all(tp <= problem.max_tp for _, tp in degrees):
            try:
                attempt, bounds, left_now, lacked_now = _divide(problem, types, groups, degrees, batches)
            except KeyError:  # Metis's program would end here: a size that was not measured
                pass
            else:
                steps += attempt - 1 if attempt else len(bounds)
                left, lacked = left_now, lacked_now
        if attempt:
            layers = tuple(int(x) for x in np.diff(bounds))
            plan = Plan(types, groups, tuple(degrees), batches, layers, problem)
            found.plans.append((plan, price(plan, min(counted, len(groups)))))
            found.steps += steps
            steps = 0
            if attempt == 1:
                return
        steps += 1
        wanted = lacked if memory_aware and lacked else left or [1 / dp for dp, _ in degrees]
        able = [s for s in range(len(groups)) if degrees[s][0] > 1]
        if not able:
            return
        s = min(able, key=lambda s: (wanted[s], s))
        degrees[s] = (degrees[s][0] // 2, degrees[s][1] * 2)


def _divide(
    problem: Problem, types: tuple[str, ...], groups: tuple[int, ...], degrees: list[tuple[int, int]], batches: int
) -> tuple[int | None, list[int], list[float], list[float]]:
    """Return the attempt that fits, its bounds, what is left and what was lacking; None: as many bounds as failures."""
    ranks = rank_types(problem, types)
    starts = [sum(groups[:s]) for s in range(len(groups) + 1)]
    stages = [ranks[a:b] for a, b in pairwise(starts)]
    layers = problem.layers
    speed = [
        1.0 / stage_ms(problem, devices, dp, tp, batches, 0, layers)
        for devices, (dp, tp) in zip(stages, degrees, strict=True)
    ]
    total = sum(speed)
    speed = [each / total for each in speed]
    room = [sum(problem.cluster.types[kind].memory_gb * 1024 for kind in devices) for devices in stages]
    lacked: list[float] = []
    for attempt in (1, 2, 3):
        bounds = partition(problem, speed)
        need = [
            _memory(problem, ranks, devices, dp, tp, batches, bounds[s], bounds[s + 1])
            for s, (devices, (dp, tp)) in enumerate(zip(stages, degrees, strict=True))
        ]
        left = [has - needs for has, needs in zip(room, need, strict=True)]
        if min(left) >= 0:
            return attempt, bounds, left, lacked
        lacked = lacked or left
        corrected = _corrected(speed, room, need)
        if corrected is None:
            return None, [0] * attempt, [], lacked
        speed = corrected
    return None, [0, 0, 0], [], lacked


def _memory(
    problem: Problem, ranks: list[str], devices: list[str], dp: int, tp: int, batches: int, first: int, end: int
) -> float:
    measured = problem.profile.measurements
    found = 0.001
    if len(set(devices)) == 1:
        sizes = [problem.batch // batches // dp]
    else:
        sizes = [digit for each in shares(problem, ranks, dp, tp, problem.batch // batches) for digit in digits(each)]
    for size in sizes:
        found += sum(measured[ranks[0], tp, size].memory_mb[first:end]) * 5.0
    return found


def _corrected(speed: list[float], room: list[float], need: list[float]) -> list[float] | None:
    spare = [s * has / needs - s if has > needs else 0.0 for s, has, needs in zip(speed, room, need, strict=True)]
    kept = [s if has > needs else s * (has / needs) * 0.9 for s, has, needs in zip(speed, room, need, strict=True)]
    missing = 0.0
    for before, after in zip(speed, kept, strict=True):
        missing += before - after
    if sum(spare) < missing:
        return None
    added = [0.0] * len(speed)
    while missing > 0.01:
        open_ = [x > 0.001 for x in spare]
        total = sum(s for s, able in zip(speed, open_, strict=True) if able)
        if not total:
            return None
        for i, able in enumerate(open_):
            given = min(spare[i], missing * (speed[i] / total)) if able else 0.0
            added[i] += given
            spare[i] -= given
            missing -= given
    return [more + base for more, base in zip(added, kept, strict=True)]


def partition(problem: Problem, speed: list[float]) -> list[int]:
    """Return the first layer of each stage and the end, as Metis divides layers by speed."""
    times = problem.profile.measurements[problem.profile.types[0], 1, 1].layers_ms
    whole = sum(times)
    return divided([time / whole for time in times], speed)


def divided(share: list[float], speed: list[float]) -> list[int]:
    """Return the first layer of each stage and the end, for layers' parts of all milliseconds."""
    count = len(speed)
    piece = [share[q // PIECES] / PIECES for q in range(PIECES * len(share))]
    room = list(speed)
    owned: list[set[int]] = [set() for _ in speed]

    def give(q: int, s: int) -> None:
        room[s] -= piece[q]
        owned[s].add(q)

    queue = list(range(len(piece) - 1 - PIECES))
    for s in range(count - 1):
        while queue:
            q = queue.pop(0)
            if room[s] <= piece[q]:
                break
            give(q, s)
    free = sorted(set(range(len(piece))) - set().union(*owned))
    for q in reversed(free):
        if len(owned[-1]) < PIECES or (q + 1 == min(owned[-1]) and room[-1] > piece[q]):
            give(q, count - 1)
    for q in sorted(set(free) - owned[-1]):
        used = [s for s in range(count) if owned[s]]
        before = max((s for s in used if max(owned[s]) < q), key=lambda s: max(owned[s]), default=0)
        behind = min((s for s in used if min(owned[s]) > q), key=lambda s: min(owned[s]), default=count - 1)
        give(q, max(range(before, behind + 1), key=lambda s: room[s]))
    layers = [
        [layer for layer in range(len(share)) if 2 * sum(q // PIECES == layer for q in mine) > PIECES] for mine in owned
    ]
    rest = [s - (sum(share[mine[0] : mine[-1] + 1]) if mine else 0.0) for s, mine in zip(speed, layers, strict=True)]
    for _ in range(3):
        most = rest.index(max(rest))
        beside = [s for s in (most - 1, most + 1) if 0 <= s < count]
        if not beside:
            break
        near = min(beside, key=lambda s: rest[s])
        if len(layers[near]) < 2:
            break
        layer = layers[near][-1 if near < most else 0]
        after = list(rest)
        after[most] -= share[layer]
        after[near] += share[layer]
        if max(after) > max(rest):
            break
        layers[near].remove(layer)
        layers[most] = sorted([*layers[most], layer])
        rest = after
    bounds = [0]
    for mine in layers:
        bounds.append(bounds[-1] + len(mine))
    return bounds


def every_plan(problem: Problem, *, mixed_tp: bool = False, metis_groups: bool = False) -> Iterator[Plan]:
    """Yield every plan that can train: all orders, powers of two, degrees, micro-batches and layers, within memory."""
    ranks = problem.cluster.devices
    for types in permutations(problem.types):
        row = rank_types(problem, types)
        for stages in range(1, min(ranks, problem.layers) + 1):
            for groups in product([1 << i for i in range(ranks.bit_length())], repeat=stages):
                if sum(groups) != ranks or (metis_groups and min(groups) < ranks // stages):
                    continue
                choices = [
                    [(group // tp, tp) for tp in (1, 2, 4) if tp <= min(group, problem.max_tp)] for group in groups
                ]
                for degrees in product(*choices):
                    if not mixed_tp and not _unmixed(row, groups, degrees):
                        continue
                    for batches in (b for b in range(1, problem.batch + 1) if problem.batch % b == 0):
                        for layers in _compositions(problem.layers, stages):
                            plan = Plan(types, groups, degrees, batches, layers, problem)
                            if _holds(plan, row):
                                yield plan


def _unmixed(row: list[str], groups: tuple[int, ...], degrees: tuple[tuple[int, int], ...]) -> bool:
    start = 0
    for group, (_, tp) in zip(groups, degrees, strict=True):
        if any(len(set(row[at : at + tp])) > 1 for at in range(start, start + group, tp)):
            return False
        start += group
    return True


def _compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        for rest in _compositions(layers - first, stages - 1):
            yield (first, *rest)


def _holds(plan: Plan, row: list[str]) -> bool:
    """Return whether every stage was measured and its devices hold its layers."""
    problem = plan.problem
    start = 0
    for s, (group, (dp, tp)) in enumerate(zip(plan.groups, plan.degrees, strict=True)):
        devices = row[start : start + group]
        start += group
        size = problem.batch // dp // plan.batches
        if any((kind, tp, size) not in problem.profile.measurements for kind in devices):
            return False
        held = [
            max(problem.profile.measurements[kind, tp, size].memory_mb[layer] for kind in devices)
            for layer in range(plan.partition[s], plan.partition[s + 1])
        ]
        if 0.001 + 5 * sum(held) > sum(problem.cluster.types[kind].memory_gb * 1024 for kind in devices):
            return False
    return True

"""Random instances of planning, and every promise that a plan of one must keep.

    python -m tests.planner.instances --count 10000        # prints what was broken, if anything

The formulas are written out here once more, as plainly as they can be, so that the planner is not its own judge.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hydragraph import planner
from hydragraph.cost.block_pieces import Constants
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.errors import Unsupported
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment

FORMS = ("mixed", "mixed", "mixed", "equal", "at MaxLen", "with zeros", "one", "nothing", "too long for all", "tokens")
EXACT = 1e-9  # relative: the same sums in another order


@dataclass(frozen=True)
class Instance:
    """Candidates for a mini-batch.

    Attributes:
        form: what kind of lengths these are.
        seed: of the search.
    """

    form: str
    profile: Profile
    candidates: tuple[tuple[Scheme, ...], ...]
    lengths: tuple[int, ...]
    seed: int

    def reach(self, candidate: Sequence[Scheme]) -> int:
        """Return the longest sequence that a candidate takes."""
        return max(int(self.profile.limits[s]) for s in candidate)


def draw(seed: int) -> Instance:
    """Return the instance of a seed; it depends on nothing else."""
    random = np.random.default_rng([20, seed])
    shapes = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3, 4, 6)]
    schemes = [shapes[i] for i in random.choice(len(shapes), random.integers(1, 7), replace=False)]
    constants, limits = {}, {}
    for scheme in schemes:
        a, b = 10 ** random.uniform(-10, -5), 10 ** random.uniform(-6, -3)
        constants[scheme] = Constants(float(a), float(b), float(random.choice([0.0, 1e-3, 0.05, 1.0])))
        limits[scheme] = int(10 ** random.uniform(1.5, 4.5))
    util = {tp: int(10 ** random.uniform(0, 3.5)) for tp in (1, 2, 4, 8)}
    profile = Profile(
        f"random {seed}", constants, util, limits=limits, hetero_sync_s=float(random.choice([0, 0.01, 1.0]))
    )
    candidates = tuple(
        tuple(schemes[i] for i in random.integers(0, len(schemes), random.integers(1, 7)))
        for _ in range(random.integers(1, 4))
    )
    form = str(random.choice(FORMS))
    sizes = draw_lengths(form, random, [limits[s] for c in candidates for s in c])
    return Instance(form, profile, candidates, tuple(sizes), int(random.integers(0, 1000)))


def draw_lengths(form: str, random: np.random.Generator, limits: Sequence[int]) -> list[int]:
    """Return a mini-batch's lengths: of the given form, for pipelines with these MaxLen."""
    count, most, least = int(random.integers(1, 60)), max(limits), min(limits)
    if form == "equal":
        return [int(random.integers(1, most + 1))] * count
    if form == "at MaxLen":
        return [int(n) for n in random.choice([*limits, most], count)]
    if form == "one":
        return [int(random.integers(1, most + 1))]
    if form == "nothing":
        return [0] * int(random.integers(0, 3))
    if form == "tokens":
        return [1] * count
    drawn = np.clip(random.lognormal(np.log(random.uniform(2, least + 2)), 1.2, count), 1, most).astype(int).tolist()
    if form == "with zeros":
        return [0 if random.random() < 0.4 else n for n in drawn]
    if form == "too long for all":
        drawn[int(random.integers(count))] = most + int(random.integers(1, 100))
    return list(drawn)


def broken(given: Instance) -> list[str]:
    """Return every promise that a plan of the instance breaks."""
    longest = max(given.lengths, default=0)
    found: list[str] = []
    seconds: list[float] = []
    plans: list[PlannedAssignment | None] = []
    for candidate in given.candidates:
        fits = given.reach(candidate) >= longest
        try:
            plan = planner.assign(candidate, given.profile, given.lengths, seed=given.seed)
        except Unsupported:
            found += ["assign refuses what fits"] if fits else []
            plans.append(None)
            seconds.append(np.inf)
            continue
        found += [] if fits else ["assign takes what does not fit"]
        found += broken_by(plan, candidate, given)
        plans.append(plan)
        seconds.append(plan.seconds + (given.profile.hetero_sync_s if len(set(candidate)) > 1 else 0.0))
    try:
        choice = planner.compare(given.candidates, given.profile, given.lengths, seed=given.seed)
    except Unsupported:
        return found + (["compare refuses what fits"] if any(np.isfinite(seconds)) else [])
    if seconds[choice.index] > min(seconds) * (1 + EXACT):
        found.append(f"compare takes {seconds[choice.index]!r} s, though a candidate takes {min(seconds)!r} s")
    if choice.assignment != plans[choice.index]:
        found.append("the same seed gives another plan")
    return found


def broken_by(plan: PlannedAssignment, strategy: Sequence[Scheme], given: Instance) -> list[str]:
    """Return every promise that one assignment breaks."""
    flat = Counter(i for pipeline in plan.micro_batches for batch in pipeline for i in batch)
    found = []
    if flat != Counter(i for i, n in enumerate(given.lengths) if n):
        found.append("not every sequence exactly once")
    if len(plan.micro_batches) != len(strategy):
        return [*found, "another number of pipelines"]
    recurrence = [0.0]
    for (_, pp), scheme, batches in zip(strategy, strategy, plan.micro_batches, strict=True):
        sizes = [[given.lengths[i] for i in batch] for batch in batches]
        if any(not 0 < sum(batch) <= given.profile.limits[scheme] for batch in sizes):
            found.append("an empty micro-batch, or one of more than MaxLen tokens")
        k = given.profile.schemes[scheme]
        costs = [sum(k.a * n * n + k.b * n for n in batch) + k.c for batch in sizes]
        recurrence.append(one_f_one_b(costs, pp))
    if abs(plan.seconds - max(recurrence)) > EXACT * max(recurrence):
        found.append(f"seconds is {plan.seconds!r}, not {max(recurrence)!r}")
    if plan.bound > plan.seconds * (1 + EXACT):
        found.append(f"the bound {plan.bound!r} is above {plan.seconds!r}")
    return found


def one_f_one_b(costs: Sequence[float], stages: int) -> float:
    """Return when 1F1B ends: every stage does its tasks in their order, each once what it needs is done."""
    count = len(costs)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, count)
        tasks = [("forward", m) for m in range(ahead)]
        for m in range(count - ahead):
            tasks += [("forward", ahead + m), ("backward", m)]
        orders.append(tasks + [("backward", m) for m in range(count - ahead, count)])
    ends: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    while len(ends) < 2 * stages * count:
        for stage, tasks in enumerate(orders):
            while position[stage] < len(tasks):
                what, m = tasks[position[stage]]
                first = stage == 0 if what == "forward" else stage == stages - 1
                last_of_forward = (stage, "forward", m) if what == "backward" else None
                needs = last_of_forward if first else (stage - 1 if what == "forward" else stage + 1, what, m)
                if needs is not None and needs not in ends:
                    break
                begin = max(clock[stage], ends[needs] if needs is not None else 0.0)
                clock[stage] = begin + costs[m] * (1 / 3 if what == "forward" else 2 / 3)
                ends[stage, what, m] = clock[stage]
                position[stage] += 1
    return max(clock)


def main() -> None:
    """Run instances and print what was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first instance")
    chosen = parser.parse_args()
    forms: Counter[str] = Counter()
    wrong, began = 0, time.process_time()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        given = draw(seed)
        forms[given.form] += 1
        if what := broken(given):
            wrong += 1
            print(f"seed {seed}, {given.form}: {'; '.join(what)}", flush=True)
    kinds = ", ".join(f"{n} {form}" for form, n in forms.most_common())
    print(f"{wrong} of {chosen.count} instances broken in {time.process_time() - began:.0f} s CPU ({kinds})")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

"""Metis's search, its memory-aware variant, and the exact optimum of their search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from hydragraph.planner.metis.cluster import MetisCluster
from hydragraph.planner.metis.divisions import divisions
from hydragraph.planner.metis.exact_optimum import Optimum, optimum
from hydragraph.planner.metis.metis_walk import MEMORY, NAIVE, walk
from hydragraph.planner.metis.problem import Ints, MetisProblem, StagePlan
from hydragraph.planner.metis.profile import MetisProfile
from hydragraph.spec import cluster as spec

Order = Literal["naive", "memory", "exact"]


@dataclass(frozen=True)
class FoundPlan(StagePlan):
    """The best plan of a search.

    Attributes:
        cost: `metis.cost` of the plan, in milliseconds.
        steps: number of steps (Table 1 of the improved paper); for "exact", number of labels.
        claimed: cost that the published program prints, which may omit stages or layers; None for "exact".
    """

    cost: float
    steps: int
    claimed: float | None = None


def search(
    profile: MetisProfile,
    cluster: MetisCluster | spec.Cluster,
    layers: int,
    batch: int,
    order: Order = "naive",
    *,
    max_tp: int | None = None,
    mixed_tp: bool | None = None,
    groups: Literal["all", "metis"] | None = None,
) -> FoundPlan:
    """Search for the best plan.

    Args:
        profile: measurements, stretched to `layers` (`MetisProfile.stretched`).
        order: "naive" is Metis's search; "memory" is the improved paper's; "exact" finds a provably cheapest plan.
        max_tp: maximum degree; default: the profile's largest, but at most 4 for "exact", because Metis extrapolated
            larger degrees.
        mixed_tp: allow replicas of several device types, which Metis prices as if all were of the first type; default:
            False for "exact", else True.
        groups: only for "exact". "all" (default) allows stages of any power of two of ranks; "metis" requires at least
            `ranks // stages` ranks per stage.

    Raises:
        ValueError: the profile does not cover the cluster or the batch, or no plan fits.
    """
    if order not in ("naive", "memory", "exact"):
        raise ValueError(f"'order' is {order!r}: use 'naive', 'memory' or 'exact'")
    largest = max(tp for _, tp, _ in profile.measurements)
    if max_tp is None:
        max_tp = min(4, largest) if order == "exact" else largest
    problem = MetisProblem(profile.stretched(layers), MetisCluster.of(cluster), batch, max_tp)
    if order == "exact":
        return exact(problem, bool(mixed_tp), groups or "all")
    if groups is not None:
        raise ValueError(f"'groups' is {groups!r}, but 'order' is {order!r}: leave groups out, or use order='exact'")
    return walked(problem, MEMORY if order == "memory" else NAIVE, mixed_tp is None or mixed_tp)


def exact(problem: MetisProblem, mixed_tp: bool, groups: str, until: float | None = None) -> FoundPlan:
    best: Optimum | None = None
    if groups == "all":
        best = optimum(problem, mixed_tp, until=until)
    else:
        # Stages of plans with S stages have at least ranks // S ranks. Search once for each minimum
        # size, with enough stages.
        ranks = problem.cluster.devices
        for smallest in (1 << i for i in range(ranks.bit_length())):
            best = optimum(problem, mixed_tp, smallest=smallest, fewest=ranks // (smallest + 1) + 1, known=best)
    if best is None:
        raise ValueError(_nothing(problem, groups == "metis"))
    plan = _plan(problem, best.types, best.batches, best.rows)
    return FoundPlan(**vars(plan), cost=best.cost, steps=best.labels)


def walked(problem: MetisProblem, order: int, mixed_tp: bool) -> FoundPlan:
    steps = 0
    best: StagePlan | None = None
    least = np.inf
    claimed = np.inf
    for types, rows, twice in _visits(problem):
        kinds = problem.kinds(types)
        places = problem.places(types)
        stages = 1 if twice else rows.shape[1]
        taken, cost, printed, *plan = walk(problem.tables, kinds, places, rows, order, problem.max_tp, mixed_tp, stages)
        steps += 2 * taken if twice else taken
        claimed = min(claimed, printed)
        if cost < least:
            least = cost
            best = _plan(problem, types, *plan)
    if best is None:
        raise ValueError(_nothing(problem, True))
    return FoundPlan(**vars(best), cost=least, steps=steps, claimed=claimed)


def _visits(problem: MetisProblem) -> Iterator[tuple[tuple[str, ...], Ints, bool]]:
    ranks = problem.cluster.devices
    for number, types in enumerate(permutations(problem.types)):
        twice = number > 0
        for stages in range(2 if number else 1, min(ranks, problem.layers) + 1):
            empty = True
            for rows in divisions(ranks, stages):
                empty = False
                yield types, rows, twice
            twice = twice and empty


def _plan(problem: MetisProblem, types: tuple[str, ...], batches: int, rows: Ints) -> StagePlan:
    groups, dp, tp = rows[:3, :-1].tolist()
    degrees = tuple(zip(dp, tp, strict=True))
    return StagePlan(types, tuple(groups), degrees, batches, tuple(np.diff(rows[3]).tolist()), problem)


def _nothing(problem: MetisProblem, metis_groups: bool) -> str:
    ranks = problem.cluster.devices
    most = min(ranks, problem.layers)
    if metis_groups and not any(True for stages in range(1, most + 1) for _ in divisions(ranks, stages)):
        return (
            f"no plan exists: Metis cannot divide {ranks} devices into S <= {most} stages of 2^k devices, at least "
            f'{ranks} // S each: use order="exact" with groups="all"'
        )
    memory = sum(problem.cluster.types[kind].memory_gb * n for kind, n in problem.cluster.counts.items())
    return (
        f"no plan for {problem.batch} sequences fits on {problem.cluster.devices} devices with {memory:g} GB in total: "
        "use more devices or fewer layers, or profile higher degrees or more micro-batch sizes"
    )


Found = FoundPlan

"""Simulated overlap of pulls and pushes with computation."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.cost.actors import stage_actors
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.instruction_work import ExcludedCosts
from hydragraph.cost.link_bytes import Direction, Traffic
from hydragraph.cost.timeline import run
from hydragraph.ir.program import Program
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

HOME = "home"


@dataclass(frozen=True)
class Overlap:
    """Seconds of transfers without computation (`alone_s`), and seconds that they add to a step (`exposed_s`)."""

    alone_s: float
    exposed_s: float
    step_s: float

    @property
    def percent(self) -> float:
        if self.alone_s <= 0:
            return 100.0
        return 100 * min(1.0, max(0.0, 1 - self.exposed_s / self.alone_s))


@dataclass(frozen=True)
class Leg:
    """Pulls of weights to a strategy, or pushes of gradients from it."""

    direction: Direction
    strategy: Strategy
    traffic: Traffic

    @property
    def name(self) -> str:
        ends = (HOME, self.strategy.name) if self.direction == "pull" else (self.strategy.name, HOME)
        return f"{self.direction}: {ends[0]} -> {ends[1]}"


def simulated(
    program: Program, leg: Leg, cluster: Cluster, tokens: int, micro_batches: int, home: Home | None = None
) -> Overlap:
    """Simulate a step with and without its transfers, and transfers alone.

    Args:
        tokens: tokens per micro-batch, all in one sequence.
    """
    strategy = leg.strategy
    counts = [micro_batches] * len(strategy.pipelines)
    actors = stage_actors(program.outline, strategy, counts, len(cluster.devices))
    degrees = sorted({stage.tp for stage in strategy.stages})
    costs = Costs(datasheet(program, cluster, degrees=degrees), cluster, home=home)
    work = costs.work(strategy, Assignment.even(counts, tokens))
    other: Direction = "push" if leg.direction == "pull" else "pull"
    without = ExcludedCosts(work, leg.direction)
    alone = ExcludedCosts(work, "computing", "messages", "ending", other)
    idle = ExcludedCosts(work, "computing", "messages", "ending", "pull", "push")
    variants = (work, without, alone, idle)
    whole, less, by_itself, nothing = (run(actors, cluster, variant).seconds for variant in variants)
    if not leg.traffic.total:
        return Overlap(0.0, 0.0, whole)
    return Overlap(by_itself - nothing, max(0.0, whole - less), whole)

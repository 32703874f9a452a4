"""Table 1 of the Hydraulis paper beside a simulation: 32B on 64 A800s, what pull and push add, hidden and not.

    P    propagation: computing and messages between stages, without anything else
    O-P  what the interaction adds: pulls and pushes alone, one after the other; or, with overlap, what an iteration
         takes with them beyond what it takes without
    O    update and commit

The homogeneous strategy is the best one that takes 32K tokens, with our assignment, as in the paper; the heterogeneous
ones are what choosing every iteration runs. Their seconds of computing are published constants, the rest is simulated
at the bandwidth of data sheets (benchmarks/published/llamas.py), with weights in 16 bits and gradients in 32.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from rich.table import Table

from benchmarks.published.llamas import known, simulated, strategy
from benchmarks.published.paper_grid import CASE, prepared
from benchmarks.published.plans import Candidate
from hydragraph.cost.instruction_work import Part
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.spec.assignment import Assignment

EVERYTHING: tuple[Part, ...] = ("computing", "pull", "push", "messages", "ending")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of an iteration, as the paper's Table 1 divides them.

    Attributes:
        propagation: P.
        apart: O-P without overlap.
        beside: O-P with pulls and pushes that overlap computation.
        update: O.
    """

    propagation: float
    apart: float
    beside: float
    update: float


# Table 1 does not say what the homogeneous strategy's 1.11 s overlap with.
PUBLISHED = {"homogeneous": Breakdown(6.78, 1.11, 1.11, 0.02), "heterogeneous": Breakdown(4.29, 1.71, 1.18, 0.02)}


def breakdown(profile: Profile, candidate: Candidate, assignment: Assignment) -> Breakdown:
    """Simulate an iteration of the case study with parts of it left out."""
    costs = known(profile, CASE.devices)
    chosen = strategy(candidate, profile)

    def seconds(*kept: Part) -> float:
        left_out = [part for part in EVERYTHING if part not in kept]
        return simulated(costs, profile, chosen, assignment, left_out).seconds

    propagation = seconds("computing", "messages")
    update = seconds("ending")
    return Breakdown(
        propagation,
        seconds("pull") + seconds("push"),
        seconds(*EVERYTHING) - propagation - update,
        update,
    )


def found(published: Profile, quantiles: Sequence[float], iterations: int) -> dict[str, Breakdown]:
    """Return the mean breakdown of the best homogeneous strategy, and of what choosing every iteration runs."""
    ready = prepared(CASE, published, quantiles, iterations)
    equal = ready.priced.candidates[ready.priced.static(ready.tuning, equal=True)]
    every: dict[str, list[Breakdown]] = {name: [] for name in PUBLISHED}
    for batch in ready.batches:
        index, assignment, _ = ready.priced.chosen(batch)
        every["heterogeneous"].append(breakdown(ready.profile, ready.priced.candidates[index], assignment))
        alike = assign_pipelines(ready.profile.pipelines(equal), batch)
        every["homogeneous"].append(breakdown(ready.profile, equal, alike))
    return {
        name: Breakdown(*map(statistics.fmean, zip(*map(astuple, one), strict=True))) for name, one in every.items()
    }


def table(simulations: dict[str, Breakdown], iterations: int) -> Table:
    """Return published and simulated seconds side by side."""
    made = Table(title=f"overlap, {CASE.title}: seconds, means of {iterations} iterations", title_justify="left")
    for heading in ("", "P", "O-P apart", "O-P overlapped", "O", "whole, apart", "whole, overlapped"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, one in simulations.items():
        for source, b in ((f"{name}, published", PUBLISHED[name]), (f"{name}, simulated", one)):
            apart, beside = (b.propagation + b.update + moving for moving in (b.apart, b.beside))
            row = (b.propagation, b.apart, b.beside, b.update, apart, beside)
            made.add_row(source, *(f"{seconds:.2f}" for seconds in row))
    return made

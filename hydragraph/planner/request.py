"""Planning requests and answers, without importing torch, numba or scipy."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health

if TYPE_CHECKING:
    from hydragraph.planner.assignment.best_candidate import Choice


Method = Literal["auto", "metis", "mixed", "search", "straggler"]
Solver = Literal["scip"]


def check_question(method: str, deadline_s: float | None = None, solver: str | None = None) -> None:
    """Check the arguments of `plan` before the slow computation of costs."""
    if method not in get_args(Method):
        raise ValueError(f"'method' is {method!r}: use {', '.join(map(repr, get_args(Method)))}")
    if solver not in (None, *get_args(Solver)):
        raise ValueError(f"'solver' is {solver!r}: use {', '.join(map(repr, get_args(Solver)))}, or leave it out")
    if solver is not None and method != "mixed":
        raise ValueError(
            f'solver {solver!r} groups devices of several types: use it with method="mixed", not {method!r}'
        )
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s >= 0):
        raise ValueError(f"deadline_s is {deadline_s!r}: give at least 0 seconds, or None to complete the search")


def check_nodes(cluster: Cluster, health: Health) -> None:
    if all(math.isinf(health.rate(rank)) for rank in range(len(cluster.devices))):
        raise Unsupported("all devices are lost", where="plan", remedy="give at least one rank a finite health rate")
    for node, ranks in cluster.ranks_by_node.items():
        if len(set(map(cluster.type_of, ranks))) > 1:
            raise Unsupported(
                f"the devices of node {node} have different types",
                where="plan",
                remedy="list the devices of each type as a separate node",
            )


@dataclass(frozen=True)
class PlanRequest:
    """Planning input that all iterations share.

    Attributes:
        charges: each candidate's iteration time minus its slowest pipeline's time.
        guessed: whether costs are assumed, not measured; assumed MaxLens are raised for longer sequences.
    """

    candidates: tuple[tuple[PipelineCost, ...], ...]
    charges: tuple[float, ...]
    seed: int = 0
    guessed: bool = False

    def reaching(self, longest: int) -> PlanRequest:
        if not self.guessed or all(p.max_len >= longest for c in self.candidates for p in c):
            return self
        stretched = (tuple(replace(p, max_len=max(p.max_len, longest)) for p in c) for c in self.candidates)
        return replace(self, candidates=tuple(stretched))

    def reach(self, candidate: int) -> int:
        return max(p.max_len for p in self.candidates[candidate])

    def only(self, candidate: int) -> PlanRequest:
        return replace(self, candidates=(self.candidates[candidate],), charges=(self.charges[candidate],))

    def seconds(self, candidate: int, assignment: Assignment) -> float:
        tokens = zip(self.candidates[candidate], assignment.tokens, strict=True)
        return max((p.seconds(batches) for p, batches in tokens if batches), default=0.0) + self.charges[candidate]

    def choose(self, lengths: tuple[int, ...]) -> Choice:
        from hydragraph.planner.assignment.best_candidate import compare_pipelines

        now = self.reaching(max(lengths, default=0))
        return compare_pipelines(now.candidates, lengths, now.charges, seed=now.seed)


@dataclass(frozen=True)
class PlanAnswer:
    choice: Choice | None
    error: Exception | None
    seconds: float


def answer(request: PlanRequest, lengths: tuple[int, ...]) -> PlanAnswer:
    """Choose a candidate; the answer holds any exception."""
    began = time.perf_counter()
    try:
        choice = request.choose(lengths)
    except Exception as error:
        return PlanAnswer(None, error, time.perf_counter() - began)
    return PlanAnswer(choice, None, time.perf_counter() - began)


def get_ready() -> None:
    pipelines = tuple(PipelineCost(1e-9, 1e-6, 1e-4, stages, 64, 8, stages) for stages in (2, 1))
    answer(PlanRequest((pipelines, pipelines[:1]), (0.0, 0.0)), (9, 17, 3, 20))

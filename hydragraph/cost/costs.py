"""Time and memory of strategies.

A strategy takes as long as its slowest pipeline (`PipelineCost.seconds`, exact) plus the time that pull, push, commit
and update add (`fixed`).

Formulas of the papers -> functions:

    AutoHet, T*: slowest pipeline, plus synchronization           `Costs.seconds`
    Malleus, y: a stage's seconds on its slowest rank             `Pricing.stages`
    Malleus, a stage's memory limit                               `Costs.max_len`
    Hydraulis, section 5.2, slices that pull and push exchange    `CostedWork.moved`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from hydragraph.cost.actors import stage_actors
from hydragraph.cost.corrections import Corrections
from hydragraph.cost.costed_work import CostedWork
from hydragraph.cost.curves import Constants
from hydragraph.cost.home_choice import HomeQuestion, choose_home
from hydragraph.cost.instruction_work import ExcludedCosts, InstructionCosts
from hydragraph.cost.longest_micro_batch import LongestMicroBatch
from hydragraph.cost.measured_profile import PipelineCost, Profile
from hydragraph.cost.memory_curves import memory_curves
from hydragraph.cost.pricing import Pricing, micro_batches_of
from hydragraph.cost.rank_memory import ADAMW_STATE_BYTES, Memory, MemoryCurve
from hydragraph.cost.shared_stage_costs import turns
from hydragraph.cost.stage_costs import StageCost, stages_end
from hydragraph.cost.timeline import Curves, Timeline, run
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.errors import Unsupported
from hydragraph.spec.argument_types import typed
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import AUTO, Home
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.strategy import Strategy

if TYPE_CHECKING:
    from hydragraph.cost.rank_memory import Blocks

FILLED = 2
# Minimum tokens of a useful micro-batch
SHORTEST = 256
# Maximum cached simulations
KEPT = 16
# Buckets of the largest size assumed to be in flight
IN_FLIGHT = 2


class Costs(Pricing):
    """Costs of strategies on a cluster.

    Args:
        profile: measurements of the model on all device types.
        health: health of ranks; None: the health in `corrections`.
        home: owners of the state, or a rule that chooses them (`of_strategies`); None: "auto". `home.nodes` defaults to
            the cluster's nodes.
        blocks: exact memory from compiled graphs; None: linear functions from the profile.
        state_bytes: bytes of weight and optimizer state per trained element.
        push_itemsize: bytes of a gradient element.
        corrections: correction factors from real runs (`hydragraph compare`).

    Raises:
        Unsupported: the profile has no blocks, or does not cover every device type of the cluster.
        ValueError: the home or the health does not match the cluster's ranks.
    """

    @typed("profile", "cluster", "health", "home")
    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        health: Health | None = None,
        *,
        home: Home | None = None,
        blocks: Blocks | None = None,
        state_bytes: int = ADAMW_STATE_BYTES,
        corrections: Corrections | None = None,
        push_itemsize: int = GRADIENT_BYTES,
    ) -> None:
        super().__init__(profile, cluster, health, home or AUTO, blocks, state_bytes, corrections, push_itemsize)
        self._given_blocks = blocks
        self._of_strategies: dict[tuple[Strategy, ...], Costs] = {}
        self._longest = LongestMicroBatch(self)
        self._fixed: dict[object, float] = {}
        self._simulated: dict[object, Timeline] = {}

    @property
    def _arguments(self) -> dict[str, Any]:
        names = ("profile", "cluster", "health", "home", "state_bytes", "corrections", "push_itemsize")
        return {name: getattr(self, name) for name in names} | {"blocks": self._given_blocks}

    def __reduce__(self) -> tuple[Any, ...]:  # without caches
        return partial(Costs, **self._arguments), ()

    def changed(self, **changes: Any) -> Costs:
        """Return costs with the arguments in `changes` replaced, except those that are None."""
        changes = {name: value for name, value in changes.items() if value is not None}
        costs = Costs(**self._arguments | changes)
        alike = costs.ranks == self.ranks and tuple(costs.cluster.types) == tuple(self.cluster.types)
        if costs.profile is self.profile and alike:
            costs._longest = LongestMicroBatch(costs, self._longest)
        if changes.keys() <= {"home"}:
            costs._simulated = self._simulated
        return costs

    def of_ranks(self, ranks: Sequence[int], home: Home) -> Costs:
        """Return costs of some ranks under `home`, renumbered in the given order."""
        return self.changed(cluster=self.cluster.of_ranks(ranks), health=self.health.of_ranks(ranks), home=home)

    def reordered(self, ranks: Sequence[int]) -> Costs:
        cluster = self.cluster.reordered(ranks)
        return self.changed(cluster=cluster, health=self.health.of_ranks(ranks), home=self.home.reordered(ranks))

    def of_strategies(self, *strategies: Strategy, tokens: int | None = None) -> Costs:
        """Return costs with the home that `home.rule` chooses for the strategies; self without a rule.

        Args:
            tokens: tokens of the largest micro-batch, for which memory is reserved; default: the fewest tokens that use
                a device well.
        """
        if self.home.rule is None:
            return self
        if strategies not in self._of_strategies or tokens is not None:
            for strategy in strategies:
                strategy.check(self.outline.layers, self.ranks, self.sizes.heads)
            home = choose_home(self.home_question(strategies, self.home, tokens))
            self._of_strategies[strategies] = self.changed(home=home)
        return self._of_strategies[strategies]

    def home_question(self, strategies: Sequence[Strategy], home: Home, tokens: int | None = None) -> HomeQuestion:
        largest = max((bucket.size for bucket in self.buckets), default=0)
        messages = IN_FLIGHT * largest * (self.sizes.itemsize + GRADIENT_BYTES)
        beside = [0.0] * self.ranks
        for strategy in strategies:
            longest = [tokens or max(SHORTEST, self.useful_tokens(p)) for p in strategy.pipelines]
            beside = list(map(max, beside, self.beside(strategy, longest)))
        element_bytes = self.state_bytes + GRADIENT_BYTES
        room = [(self.memory_of(rank) - need - messages) / element_bytes for rank, need in enumerate(beside)]
        return self.question(strategies, home, room)

    def pipeline(
        self,
        pipeline: Pipeline,
        schedule: str = DEFAULT_SCHEDULE,
        limit: int | None = None,
        strategy: Strategy | None = None,
    ) -> PipelineCost:
        """Return the cost of a pipeline.

        Args:
            limit: most tokens of a micro-batch; None: as many as fit in memory.
            strategy: as for `max_len`.

        Raises:
            Unsupported: a kind of stage was not measured, or a stage has a lost rank.
            ValueError: the pipeline and the model differ in their number of layers.
        """
        self.profile.check_layers(pipeline)
        limit = self.max_len(pipeline, strategy) if limit is None else limit
        return self._pipeline(pipeline, self.stages(pipeline), limit, schedule)

    def pipelines(self, strategy: Strategy) -> tuple[PipelineCost, ...]:
        """Return the cost of each pipeline.

        Shared stages are slower (`cost.shared_stage_costs`), and store micro-batches of all their pipelines.
        """
        if self.home.rule is not None:
            return self.of_strategies(strategy).pipelines(strategy)
        whole = None if strategy.shares else strategy
        alone = tuple(self.pipeline(p, strategy.schedule, strategy=whole) for p in strategy.pipelines)
        if not strategy.shares:
            return alone
        slowdowns = turns(strategy, [cost.envelope.work(cost.util_len) + cost.c for cost in alone])
        shared = []
        for pipeline, cost, factors in zip(strategy.pipelines, alone, slowdowns, strict=True):
            stages = [stage.slower(factor) for stage, factor in zip(cost.parts, factors, strict=True)]
            shared.append(self._pipeline(pipeline, stages, self.max_len(pipeline, strategy), strategy.schedule))
        return tuple(shared)

    def _pipeline(self, pipeline: Pipeline, stages: Sequence[StageCost], limit: int, schedule: str) -> PipelineCost:
        util = self.useful_tokens(pipeline)
        by_row: dict[int, list[Constants]] = {}
        for stage, row in zip(stages, pipeline.rows, strict=True):
            by_row.setdefault(row, []).append(stage.constants)
        of_rows = [row[0] if len(row) == 1 else Constants.sum((1.0, k) for k in row) for row in by_row.values()]
        slowest = max(of_rows, key=lambda k: k.work(util) + k.c)
        if self.measured and slowest.failed:
            raise Unsupported(
                f"the fit of a stage's time failed (a = {slowest.a:g}, b = {slowest.b:g}, c = {slowest.c:g})",
                where=f"profile {self.profile.name}",
                remedy="measure again, on a quieter machine or with longer sequences: hydragraph profile --longest",
            )
        return PipelineCost(
            slowest.a,
            slowest.b,
            slowest.c,
            stages=len(of_rows),
            max_len=limit,
            util_len=min(util, max(limit, 1)),
            devices=len(pipeline.devices),
            parts=tuple(stages),
            schedule=schedule,
            near=slowest.near,
            rows=pipeline.rows if pipeline.interleaved else (),
        )

    def max_len(self, pipeline: Pipeline, strategy: Strategy | None = None, beside: float = 0.0) -> int:
        """Return the most tokens of a micro-batch that fit in memory under the default schedule.

        Args:
            strategy: the pipeline's strategy; pipelines that share stages are assumed to have micro-batches of equal
                length.
            beside: additional bytes that every rank needs.
        """
        return self._longest.max_len(pipeline, strategy, beside)

    def beside(self, strategy: Strategy, tokens: Sequence[int]) -> list[float]:
        """Return the bytes that each rank needs besides its state, if `tokens` are the pipelines' longest
        micro-batches.
        """
        return self._longest.beside(strategy, tokens)

    def seconds(self, strategy: Strategy, assignment: Assignment) -> float:
        """Return an iteration's seconds, simulated if any stage is streamed or offloaded."""
        if strategy.streams or strategy.offloads:
            return self.simulate(strategy, assignment).seconds
        return self.pipelines_end(strategy, assignment) + self.fixed(strategy)

    def pipelines_end(self, strategy: Strategy, assignment: Assignment) -> float:
        """Return the seconds until the slowest pipeline ends, without pull, push, commit and update."""
        if strategy.shares:
            return self._computing_s(strategy, assignment.counts, self.work(strategy, assignment))
        ends = [
            stages_end(self.stages(p), batches, strategy.schedule, p.rows)
            for p, batches in zip(strategy.pipelines, assignment.tokens, strict=True)
            if batches
        ]
        return max(ends, default=0.0)

    def fixed(self, strategy: Strategy) -> float:
        """Return the seconds that pull, push, commit and update add to an iteration.

        They are simulated with two micro-batches per stage, because computation hides part of the traffic.
        """
        if self.home.rule is not None:
            return self.of_strategies(strategy).fixed(strategy)
        key = (strategy.pipelines, strategy.schedule)
        if key not in self._fixed:
            filled = self._filled(strategy, SHORTEST)
            work = self.work(strategy, filled)
            whole = self._timeline(strategy, filled.counts, work).seconds
            self._fixed[key] = max(0.0, whole - self._computing_s(strategy, filled.counts, work))
        return self._fixed[key]

    def _filled(self, strategy: Strategy, shortest: int = 1) -> Assignment:
        counts = [FILLED * len(p.stages) for p in strategy.pipelines]
        return Assignment.even(counts, [max(shortest, self.useful_tokens(p)) for p in strategy.pipelines])

    def _computing_s(self, strategy: Strategy, counts: Sequence[int], work: InstructionCosts) -> float:
        return self._timeline(strategy, counts, ExcludedCosts(work, "pull", "push", "ending")).seconds

    def _timeline(
        self, strategy: Strategy, counts: Sequence[int], work: InstructionCosts, curves: Curves | None = None
    ) -> Timeline:
        return run(_actors(self.outline, strategy, tuple(counts), self.ranks), self.cluster, work, curves)

    def simulate(self, strategy: Strategy, assignment: Assignment) -> Timeline:
        """Simulate one iteration."""
        if self.home.rule is not None:
            return self.of_strategies(strategy).simulate(strategy, assignment)

        def curves(timeline: Timeline) -> Sequence[MemoryCurve]:
            batches = micro_batches_of(strategy, assignment)
            return memory_curves(timeline, lambda rank, over: self.walk(strategy, batches, rank, over=over))

        key = self.home, strategy, assignment
        if key not in self._simulated:
            work = self.work(strategy, assignment)
            self._simulated[key] = self._timeline(strategy, assignment.counts, work, curves)
            for oldest in list(self._simulated)[:-KEPT]:
                del self._simulated[oldest]
        return self._simulated[key]

    def work(self, strategy: Strategy, assignment: Assignment) -> CostedWork:
        """Return the cost of each instruction.

        Raises:
            ValueError: strategy, assignment and cluster do not match.
            Unsupported: a cost was not measured, or a rank is lost.
        """
        strategy.check(self.outline.layers, self.ranks, self.sizes.heads)
        return CostedWork(self.of_strategies(strategy), strategy, assignment)

    def memory(self, strategy: Strategy, assignment: Assignment | None = None) -> tuple[Memory, ...]:
        """Return an upper bound on every rank's peak memory; `hg.simulate(...).memory` is tighter.

        Args:
            assignment: default: two micro-batches per stage.
        """
        costs = self.of_strategies(strategy)
        batches = micro_batches_of(strategy, assignment or self._filled(strategy))
        return tuple(costs.walk(strategy, batches, rank).peak() for rank in range(self.ranks))


# Instructions depend neither on costs nor on owners.
_actors = lru_cache(maxsize=8)(stage_actors)

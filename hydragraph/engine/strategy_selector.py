"""Choice of each iteration's strategy and assignment by rank 0."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.engine.background_compile import BackgroundCompile, StrategyPreparation
from hydragraph.engine.candidate_strategies import Planning, planner_of
from hydragraph.engine.step_planner import IterationPlan, IterationPlanner
from hydragraph.errors import Unsupported
from hydragraph.frontend.mini_batch import PlanningTimes
from hydragraph.planner.quick_plan import assign
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class _Change:
    strategies: tuple[Strategy, ...]
    request: PlanRequest
    static: int | None
    ready_first: bool


@dataclass(frozen=True)
class _Told:
    plan: IterationPlan | ValueError | None
    coming: tuple[Strategy, ...] = ()
    ready_first: bool = False


class StrategySelector:
    """Selector of strategies and assignments, which rank 0 plans and broadcasts.

    Args:
        before: previous selector, which is closed; its processes are reused.
    """

    def __init__(
        self,
        strategies: tuple[Strategy, ...],
        groups: Groups,
        planning: Planning,
        home: Home,
        readying: StrategyPreparation,
        before: StrategySelector | None = None,
    ) -> None:
        self.strategies = strategies
        self.decision = ""
        self.refused = ""
        self._groups = groups
        self._readying = readying
        self._measured = planning.profile is not None
        self._plans = self._measured or len(strategies) > 1
        # On rank 0
        self._planner: IterationPlanner | None = None
        # On rank 0
        self._change: _Change | None = None
        self._coming: tuple[Strategy, ...] = ()
        self._making: BackgroundCompile | None = None
        self._ready = False
        if self._plans and groups.world.rank == 0:
            self._planner, self.decision = planner_of(strategies, planning, groups.world.ranks, home)
            if before is not None:
                self._planner.take_over(before._planner)
        if before is not None:
            before.close()

    @property
    def plans(self) -> bool:
        return self._planner is not None

    @property
    def static(self) -> int | None:
        return None if self._planner is None else self._planner.static

    def announce(self, lengths: tuple[int, ...]) -> None:
        if self._planner is not None:
            self._planner.announce(lengths)

    def choose(self, lengths: tuple[int, ...], strategy: Strategy | None) -> tuple[Strategy, Assignment, PlanningTimes]:
        """Choose a mini-batch's assignment and, unless given, its strategy; all ranks call this.

        Raises:
            ValueError: planning failed; raised on every rank.
        """
        began = time.perf_counter()
        if strategy is not None or not self._plans:
            strategy = strategy or self.strategies[0]
            assignment = assign(strategy, lengths)
            return strategy, assignment, PlanningTimes(time.perf_counter() - began)
        plan = self._plan(lengths)
        if isinstance(plan, ValueError):
            raise agreed(plan)
        expected = plan.seconds if self._measured else 0.0
        planned = PlanningTimes(time.perf_counter() - began, plan.hidden_s, expected)
        return self.strategies[plan.candidate], plan.assignment, planned

    def change(
        self, strategies: tuple[Strategy, ...], request: PlanRequest, static: int | None, ready_first: bool
    ) -> None:
        """Choose from other strategies on rank 0, as in `Executable.choose_from`.

        Raises:
            Unsupported: the previous call's strategies have just become ready.
        """
        if self._ready:
            raise Unsupported(
                "strategies of an earlier call have just become ready, and the next step chooses among them",
                where="choose_from",
                remedy="call choose_from again after that step",
            )
        self._change = _Change(strategies, request, static, ready_first)
        self.refused = ""

    @property
    def changing(self) -> bool:
        return self._change is not None or self._ready

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
        self._drop()

    def _plan(self, lengths: tuple[int, ...]) -> IterationPlan | ValueError:
        # The new strategies became ready on all ranks in the previous step. Rank 0 plans with them
        # now; the others follow in this step.
        if self._ready:
            self.strategies = self._coming
            self._replan()
            self._drop()
        # Without `ready_first`, the change also takes effect now, before rank 0 plans.
        change = self._change
        if change is not None and not change.ready_first:
            self._replan()
        plan: IterationPlan | ValueError | None = None
        if self._planner is not None:
            try:
                plan = self._planner.plan(lengths)
            except ValueError as error:
                plan = error
        # Rank 0 repeats pending strategies in every step, so that all ranks
        # take the same branch of `_follow`.
        message = _Told(plan) if change is None else _Told(plan, change.strategies, change.ready_first)
        received = self._groups.tell(message)
        self._follow(received)
        assert received.plan is not None, "rank 0 always sends a plan"
        return received.plan

    def _replan(self) -> None:
        if self._planner is not None and self._change is not None:
            self._planner.change(self._change.request, self._change.static)
        self._change = None

    def _follow(self, told: _Told) -> None:
        coming = told.coming
        if not coming:
            return
        if not told.ready_first:
            self._drop()
            self.strategies = coming
        # Prepare the strategies in the background during training.
        elif coming != self._coming:
            self._drop()
            self._coming = coming
            self._making = self._readying.begin(coming)
        else:
            self._see()

    def _see(self) -> None:
        making, node = self._making, self._groups.world.node
        settled = making is None or making.settled
        # every: (node, settled, offer) by rank; only the rank that prepares
        #   for its node has an offer
        every = self._groups.gather((node, settled, None if making is None else making.offer))
        if all(settled for _, settled, _ in every):
            here = [offer for its_node, _, offer in every if offer is not None and its_node == node]
            # No rank may use the strategies before all have their graphs.
            reasons = self._groups.gather("".join(map(self._readying.take, here)))
            self.refused = next(filter(None, reasons), "")
            self._ready = not self.refused
            if self.refused:
                self._change = None
                self._drop()

    def _drop(self) -> None:
        if self._making is not None:
            self._making.close()
        self._coming = ()
        self._making = None
        self._ready = False

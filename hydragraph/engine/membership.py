"""Ranks that join or leave an executable, and movement of state between ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.background_compile import StrategyPreparation
from hydragraph.engine.candidate_strategies import (
    Choices,
    Planning,
    candidates_among,
    candidates_of,
    home_among,
    strategy_for,
)
from hydragraph.engine.collective_call import collective
from hydragraph.engine.compiled_model import CompiledModel, ExecutableOptions, of_least_cut
from hydragraph.engine.iterations import IterationRunner
from hydragraph.engine.session import Session
from hydragraph.engine.state_transfer import LoadedSession, Moved, Restore, bring
from hydragraph.engine.state_transition import StateTransition
from hydragraph.engine.strategy_history import StrategyHistory
from hydragraph.engine.strategy_selector import StrategySelector
from hydragraph.engine.weight_export import persistent_buffers
from hydragraph.errors import RankFailure
from hydragraph.ir.program import Program
from hydragraph.private.torch_modes import own_modes
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_agreement import ProgressLog, StateProgress, meet
from hydragraph.runtime.supported_optimizers import OptimizerFactory
from hydragraph.spec.argument_types import typed
from hydragraph.spec.home import AUTO, Home, home_of
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)


class Membership(IterationRunner):
    """Connection of ranks and movement of state; `Executable` documents the attributes."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        given: Choices,
        optimizer: OptimizerFactory | None,
        world: World,
        options: ExecutableOptions = ExecutableOptions(),  # noqa: B008
        *,
        planning: Planning | None = None,
        home: Home | None = None,
        joining: bool = False,
    ) -> None:
        compiled = CompiledModel(model, program, world, options)
        super().__init__(compiled, StateTransition(compiled.initial(model, options.blocks)), world)
        self.program = program
        self.seed = options.seed
        self.given = given
        self.wanted_home = AUTO if home is None else home
        self.device = world.device
        self.progress_s = options.progress_s
        self.past = StrategyHistory()
        self.joined = 0
        self._optimizer = optimizer
        self.planning = planning or Planning()
        self._first_profile = self.planning.profile
        self._measures = bool(self.planning.explanation)
        self.measured_seats: Sequence[int] | None = None
        if joining:
            if given != "auto":
                several = [given] if isinstance(given, Strategy | str) else given
                compiled.check_modes([strategy_for(choice, program) for choice in several])
            return
        self.begin(model, world, self.wanted_home, self._first_strategies(world), self._first_profile)

    def begin(
        self,
        model: nn.Module,
        world: World,
        home: Home,
        strategies: tuple[Strategy, ...],
        profile: Profile | Costs | None,
    ) -> None:
        """Distribute the model's weights to a world's ranks; all ranks must call this."""
        compiled = self._compiled
        self.strategies = strategies
        compiled.check_modes(strategies)
        self.planning = replace(self.planning, profile=compiled.priced(profile))
        chosen = home_among(world, self.program, home, strategies, self.planning)
        inputs = (compiled, world, chosen, self._optimizer, compiled.identity(strategies))
        self._transition.held = Session.begin(*inputs, fill=functools.partial(compiled.fill, model))
        self._choose()

    def _first_strategies(self, world: World) -> tuple[Strategy, ...]:
        planning, compiled = self.planning, self._compiled
        if self.given == "auto" and planning.strategies:
            return planning.strategies

        def among(profile: Profile | Costs | None) -> tuple[Strategy, ...]:
            passed = compiled.variants.strategies
            inputs = replace(planning, profile=profile)
            how = (self.program, world.ranks, inputs, self.wanted_home, passed, self.may_stream)
            return candidates_among(world, self.given, *how)

        alike = compiled.sums is not None and self.given == "auto"
        return of_least_cut(planning.profile, among) if alike and planning.profile else among(planning.profile)

    @property
    def recent(self) -> tuple[Strategy, ...]:
        """Strategies that these ranks have trained with, most recent first."""
        return self._recent

    @property
    def given_profile(self) -> Profile | Costs | None:
        return self._compiled.priced(self._first_profile)

    @property
    def profile(self) -> Profile | Costs | None:
        """Costs of strategies, or None if not measured."""
        return self.planning.profile

    @property
    def world(self) -> World:
        """This process's place among the ranks."""
        return self._session.world

    @property
    def groups(self) -> Groups:
        return self._session.groups

    @property
    def home(self) -> HomeState:
        """This rank's share of the fp32 weights and gradients."""
        return self._session.home

    @property
    def owners(self) -> Home:
        """Current home: which ranks own the state."""
        return self._session.owners.home

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer, or None if compiled without one."""
        return self._session.optimizer

    @property
    def may_stream(self) -> bool:
        """Whether strategies with streaming stages may run."""
        return self._compiled.sums is None

    def leave(self) -> None:
        """Close the communicators but keep the state, to connect again.

        This call waits only for a running save and, during a handover, for other ranks. Call `leave` before destroying
        the process group.
        """
        if self._transition.held is not None:
            try:
                self._transition.held.saver.close()
            except Exception as error:
                _LOG.warning("a save was not completed: %s", error)
            try:
                with self._calling("leave"):
                    self._stop_handover()
            except RankFailure as failure:
                _LOG.info("the handover of state during training did not complete: %s", failure)
        for groups in self._transition.groups:
            groups.close()
        if self._transition.held is not None:
            self._transition.held.executor.drop_buffers()

    @typed("world", "before")
    def move(
        self,
        world: World,
        home: Home | str | None,
        before: Sequence[int | None],
        restore: Restore | None = None,
        strategy: Choices | None = None,
        profile: Profile | Costs | None = None,
    ) -> Moved:
        """Continue with other ranks or owners; all ranks of the new world must call this.

        Call `move` after a failure or between two steps; joining ranks use an executable compiled with `joining=True`.
        The state and hyperparameters come from surviving ranks. If only some ranks have finished a step, the others
        finish it. Every rank keeps its old state until all have the new state. If the move fails, reconnect and repeat
        it.

        Args:
            world: this process's place in the new world (with a process group), or the current world.
            home: new owners of the state; by default the home given to `compile`.
            before: each rank's previous number, or None for a joining rank. Unlisted ranks are lost.
            restore: checkpoint, as for `load`, that all ranks read if state is lost. Joining ranks must pass the same.
            strategy: strategies to choose from; by default the current ones, which must fit the new ranks.
            profile: new costs of strategies.

        Raises:
            ValueError: `before`, a strategy or the home does not fit, or state is lost; raised on all ranks.
            RankFailure: another rank failed during the move; the state is unchanged.
        """
        self._admit("move")
        began = time.perf_counter()
        requested_home = home_of(home)
        home = self.wanted_home if requested_home is None else requested_home
        holding = self._transition
        self._next = self._promised = None
        # With unbroken communicators and the same ranks, only owners change:
        # the groups are reused.
        stays = holding.held is not None and world is holding.held.world and not world.watch.broken
        stays = stays and list(before) == list(range(world.ranks))
        chosen = stays and strategy is None and profile is None
        # First, end the old world's communication.
        self._stop_handover() if stays else self.leave()
        self._watch = world.watch
        with own_modes("move"), world.watch.calling("move"):
            # Second, agree on the newest state that survivors can complete. `meet` is pure, so equal
            # reports give equal results.
            reports = world.gather((holding.standing(world.rank), self.strategies, self._communications))
            meeting = meet([standing for standing, _, _ in reports], before)
            self._communications = max(number for _, _, number in reports)
            # A rank one update behind has all gradients, and updates now.
            finished = holding.agree(meeting, world.rank)
            # Third, choose strategies and owners for the new ranks. Joining ranks
            # know no strategies, so all use the leader's.
            current_strategies = reports[meeting.leader or 0][1]
            self.planning = replace(self.planning, profile=self._compiled.priced(profile or self.planning.profile))
            choices = current_strategies if strategy is None else strategy
            how = (self.program, world.ranks, self.planning, home)
            self.strategies = candidates_of(choices, *how, streaming=self.may_stream)
            self._compiled.check_modes(self.strategies)
            self.planning = replace(self.planning, profile=self._compiled.priced(self.planning.profile))
            home = home_among(world, self.program, home, self.strategies, self.planning)
            counts = meeting.before[world.rank] is not None
            log = ProgressLog(StateProgress(meeting.updates, meeting.norm))
            ending = holding.held if stays else None
            inputs = (self._compiled, world, home, self._optimizer, self._compiled.identity(self.strategies))
            # Fourth, fill a new session. A failed move can be repeated from the old one.
            session = Session.begin(*inputs, log=log, ending=ending)
            holding.expect(session)
            own_buffers = persistent_buffers(self._compiled, session)
            brought = bring(session, holding.held if counts else None, meeting, restore, own_buffers)
            holding.arrived(meeting.generation + 1)
            # Switch only after all ranks have received everything. If ranks are lost now, those not yet
            # switched still offer the complete new state to the next `meet`.
            session.groups.gather(None)
            holding.take()
            self._take_buffers(brought)
            self._choose(chosen)
        step = self.steps
        seconds = time.perf_counter() - began
        _LOG.info("moved to rank %d of %d at step %d in %.2f s", world.rank, world.ranks, step, seconds)
        restored = step if brought.restored else None
        return Moved(step, finished, restored, brought.extra, brought.received, seconds, brought.read)

    @collective("rehome")
    def rehome(self, home: Home | str) -> None:
        """Move state to another home's owners during the next step; all ranks must call this.

        Results equal those of a later `move` bitwise, but training waits only for gradients. Losing a rank, or another
        load or move, discards the handover.

        Raises:
            ValueError: the home does not fit, or another handover is in progress; raised on all ranks.
        """
        # The next step completes a handover, so only one can be in progress.
        if self._transition.reshard is not None:
            on_its_way = self._transition.reshard.arriving.owners.home
            raise agreed(ValueError(f"rehome: state is still moving to {on_its_way}: train a step first"))
        self._transition.begin()
        ending = self._session
        requested_home = home_of(home) or self.wanted_home
        chosen = home_among(ending.world, self.program, requested_home, self.strategies, self.planning)
        log = ProgressLog(ending.log.progress)
        arriving = Session.begin(self._compiled, ending.world, chosen, self._optimizer, {}, log=log, ending=ending)
        self._transition.hand_over(arriving)

    def _take_buffers(self, brought: LoadedSession) -> None:
        for name, buffer in brought.buffers.items():
            self._compiled.buffers[name].copy_(buffer)

    def _stop_handover(self) -> None:
        self._transition.stop_handover(self._watch.broken)

    def _calling(self, what: str) -> AbstractContextManager[object]:
        return nullcontext() if self._watch.broken else self._watch.calling(what)

    def _choose(self, as_before: bool = False) -> None:
        self._begin_era()
        session, compiled = self._session, self._compiled
        if not as_before:
            readying = StrategyPreparation(compiled.variants, compiled.check, session.world.local_rank == 0)
            home = session.owners.home
            self._choosing = StrategySelector(
                self.strategies, session.groups, self.planning, home, readying, self._choosing
            )

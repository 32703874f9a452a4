"""Iterations of an executable: agree on a call, choose a strategy, prepare programs, and run them."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable

from hydragraph import log
from hydragraph.cluster.agreement import raise_together
from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.cluster.rendezvous.member import CALLED, here
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.engine.candidate_strategies import strategy_for
from hydragraph.engine.collective_call import ENDS, CollectiveCalls
from hydragraph.engine.compiled_model import CompiledModel
from hydragraph.engine.session import Session
from hydragraph.engine.state_transition import StateTransition
from hydragraph.engine.step_agreement import AgreedStep, Inputs, StepCall
from hydragraph.engine.step_report import StepReport
from hydragraph.engine.strategy_selector import StrategySelector
from hydragraph.errors import Stopped, Unsupported
from hydragraph.frontend.mini_batch import AssignedBatch, MiniBatch, digest
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program_outline import Purpose
from hydragraph.runtime.executor import IterationOutcome
from hydragraph.runtime.speed_probe import MOST_S, SpeedProbe
from hydragraph.runtime.supported_optimizers import check_elementwise, check_settings
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

# Steps between measurements of a device's speed
PROBED_EVERY = 4
RECENT = 4

# Integers: micro-batch counts
_Running = tuple[Strategy, tuple[int, ...], Purpose]


class IterationRunner(CollectiveCalls):
    """Runner of iterations; `Executable` documents the attributes."""

    def __init__(self, compiled: CompiledModel, holding: StateTransition, world: World) -> None:
        super().__init__(world.watch)
        self._compiled = compiled
        self._transition = holding
        self.strategies: tuple[Strategy, ...] = ()
        self.spans: list[TraceEvent] | None = None
        self.watched = False
        self.stopping = 0
        self.listens: Callable[[], int] | None = None
        self._choosing: StrategySelector | None = None
        self._next: AgreedStep | None = None
        self._communications = 0
        self._probe = SpeedProbe(world.device)
        self._begin_era()

    def _admit(self, what: str) -> None:
        super()._admit(what)
        held = self._transition.held
        if held is not None and held.log.progress.torn and what not in (*ENDS, "load", "move", "wait_saved"):
            raise ValueError(f"{what}: an update was interrupted halfway; call load or move")

    def _begin_era(self) -> None:
        self._ran: dict[int, _Running] = {}
        self._recent: tuple[Strategy, ...] = ()
        self._lasted: float | None = None
        self._prepared: set[tuple[Strategy, Purpose]] = set()

    @property
    def _session(self) -> Session:
        return self._transition.session

    @property
    def _chooser(self) -> StrategySelector:
        if self._choosing is None:
            raise ValueError("this executable has not joined the other ranks yet: call move first")
        return self._choosing

    @property
    def steps(self) -> int:
        """Number of updates of the state."""
        return self._session.log.progress.updates

    def _iterate(self, inputs: Inputs, purpose: Purpose) -> StepReport:
        began = time.perf_counter()
        batch, work, outcome, preparing_s = self._run(inputs, purpose)
        if not outcome.finite:
            remedy = "lower the learning rate or clip gradients (max_grad_norm), and inspect this mini-batch"
            if math.isfinite(outcome.loss) and math.isnan(outcome.grad_norm):
                remedy = (
                    "lower the learning rate if the loss was rising, else look for a square root, a division or a "
                    "logarithm at 0 in the model and its loss"
                )
            raise FloatingPointError(
                f"loss {outcome.loss:.4g} or gradient norm {outcome.grad_norm:.4g} is "
                f"not finite, so nothing was updated; {remedy}"
            )
        return StepReport(
            step=self.steps,
            loss=outcome.loss,
            tokens=batch.tokens,
            grad_norm=outcome.grad_norm,
            strategy=str(work.strategy),
            chosen=work.strategy,
            sequences=len(batch.sequences),
            micro_batches=work.assignment.counts,
            seconds=time.perf_counter() - began,
            padding=work.padding,
            planning_s=work.planning.exposed_s,
            planning_hidden_s=work.planning.hidden_s,
            preparing_s=preparing_s,
            expected_s=work.planning.expected_s,
            ranks=outcome.ranks,
            assignment=work.assignment,
        )

    def _run(self, inputs: Inputs, purpose: Purpose) -> tuple[MiniBatch, AssignedBatch, IterationOutcome, float]:
        """Run one iteration; errors raised by all ranks together are not rank failures."""
        self._transition.begin()
        trains = purpose == "train"
        log.at_step(self.steps + trains)
        began = time.perf_counter()
        self._communications += 1
        # _promised: call agreed on at the last commit, made now; coming:
        #   promise for the next call
        coming: AgreedStep | None = None
        # A rejected step discards the promise
        if trains:
            coming, self._next = self._next, None
        with self._watch.step(self._communications, self._describe):
            promised = self._promised is not None
            # Ranks agree on the call before planning it: messages of different calls would not match.
            # After a promise, only later changes are checked, and the commit carries the result
            # (`says`).
            batch, strategy = self._agree(inputs, purpose)
            refused = self._refusal(purpose) if promised else None
            work = self._assign(batch, strategy, purpose)
            assigned = time.perf_counter()
            # All ranks build the program and compile new graphs before any
            # sends messages.
            self._prepare(work, purpose)
            preparing_s = time.perf_counter() - assigned
            session = self._session
            # At the program's commit, `says` tells others the next call; then `_update` is called.
            session.executor.probe = self._probe if trains and self._probes() else None
            session.executor.beside = self._transition.reshard if trains else None
            spans = self.spans if trains else None
            says = functools.partial(self._says, coming, purpose, refused)
            try:
                outcome = session.execute(work, purpose, batch, inputs.divide_by, self._update, spans, says)
            finally:
                session.executor.beside = None
            self._transition.go_over()  # new owners take over even without an update
            # No rank has updated, because one refused, or settings differed.
            # All raise the reason.
            if not outcome.alike:
                raise_together(self._session.groups, refused, refused)
                self._refuse_other_settings(purpose)
        if trains:
            self._lasted = time.perf_counter() - began
            # The next call is agreed, so its `_agree` needs no communication.
            if coming is not None and coming.heard(outcome.said) and outcome.finite:
                self._promised = coming
        return batch, work, outcome, preparing_s

    def _update(self, norm: float) -> None:
        # After a handover, the new owners have all gradients, and update instead of the old.
        self._transition.go_over()
        self._session.update(norm)

    def _agree(self, inputs: Inputs, purpose: Purpose) -> tuple[MiniBatch, Strategy | None]:
        """Return the checked mini-batch and strategy once all ranks agree on them.

        Raise an error on all ranks if the call is invalid, calls differ, a save has failed, or a rank should stop.
        """
        # First, compare the calls: at the previous commit if promised,
        # otherwise now.
        promised = self._promised
        if promised is not None:
            if not inputs.same_as(promised.inputs):
                raise ValueError("step: the arguments differ from those of `promise`; pass the same objects")
            self._promised = None
            call, ranks = promised.agreed
        else:
            call = self._checked(inputs, purpose)
            ranks = self._session.compare(call.mark, self._reason_to_stop() if purpose == "train" else self._heard())
        # Then raise the reason to refuse the call, if any. All ranks take the same branch: `ranks`
        # is equal on all, and digests include refusals.
        if ranks.unsaved:
            try:
                self._session.saver.wait()
            except Exception as error:
                agreed(error)
                raise
            raise AssertionError("waiting for a failed save raises on every rank")
        if not ranks.same:
            same = self._session.groups.same_everywhere
            try:
                # Comparisons raise on all ranks if texts differ, from the most specific
                # text to the digest of everything.
                same("call", purpose)
                self._refuse_other_settings(purpose)
                own = f"{call.mark:016x}" if call.refused is None else f"refused: {call.refused}"
                same("mini-batch, strategy or call", own)
            except ValueError as error:
                raise agreed(error) from call.refused
            raise AssertionError("ranks whose digests differ must fail to agree")
        if call.refused is not None:
            raise agreed(call.refused)
        if ranks.stopping:
            _LOG.info("a rank was asked to stop (%d): the next step does not start", ranks.stopping)
            raise agreed(Stopped(ranks.stopping))
        assert call.batch is not None
        return call.batch, call.strategy

    def _checked(self, inputs: Inputs, purpose: Purpose) -> StepCall:
        batch: MiniBatch | None = None
        strategy: Strategy | None = None
        refused: Exception | None = None
        try:
            if inputs.strategy is not None:
                strategy = strategy_for(inputs.strategy, self._compiled.program)
                self._compiled.check_strategy(strategy, self._session.world.ranks)
            batch = self._compiled.mini_batch(inputs.sequences, purpose)
            batch.divisor(inputs.divide_by)
            if self._compiled.sums is not None:
                self._compiled.sums.check_count(len(batch.sequences))
            refused = self._refusal(purpose)
        except Exception as error:
            refused = error
        # Digests include errors: ranks that refuse for the same reason
        # raise it together.
        accepted = (str(strategy), purpose, inputs.divide_by, self._update_settings(purpose), self._restricted)
        return StepCall(batch, strategy, refused, digest(repr(accepted if refused is None else refused), batch))

    def _refusal(self, purpose: Purpose) -> Exception | None:
        try:
            if purpose == "train" and self._session.optimizer is not None:
                check_elementwise(self._session.optimizer)
                check_settings(self._session.optimizer)
            self._session.home.check_parameters()
            trains = purpose in ("train", "gradients")
            self._compiled.state.check(trains)
            if not trains:
                self._compiled.state.refuse_evaluation()
        except Exception as error:
            return error
        return None

    def _refuse_other_settings(self, purpose: Purpose) -> None:
        what = "optimizer's settings, such as the learning rate"
        try:
            self._session.groups.same_everywhere(what, self._update_settings(purpose))
        except ValueError as error:
            raise agreed(error) from None

    def _update_settings(self, purpose: Purpose) -> str:
        return self._session.settings if purpose == "train" else ""

    def _says(self, coming: AgreedStep | None, purpose: Purpose, refused: Exception | None) -> tuple[int, ...]:
        # -1 refuses the update on all ranks. The shift leaves 52 bits, exact in float64.
        update = -1 if refused is not None else digest(self._update_settings(purpose), None) >> 10
        if coming is None:
            return self._session.saying(-1, 0, update)
        coming.call = self._checked(coming.inputs, "train")
        return self._session.saying(coming.call.mark, self._reason_to_stop(), update)

    def _reason_to_stop(self) -> int:
        member = here()
        called = CALLED if member is not None and member.called else 0
        return max(self.stopping, self._heard(), called)

    def _heard(self) -> int:
        return self.listens() if self.listens is not None else 0

    def _assign(self, batch: MiniBatch, strategy: Strategy | None, purpose: Purpose) -> AssignedBatch:
        chosen = self._chooser.choose(batch.lengths, strategy)
        # `choose_from` may have changed the strategies
        self.strategies = self._chooser.strategies
        world, update = self._session.world, self.steps + 1
        return self._compiled.packed(batch, *chosen, world, purpose, update)

    def _prepare(self, work: AssignedBatch, purpose: Purpose) -> None:
        """Build this rank's program; a failure is raised on all ranks before messages are sent."""
        running = (work.strategy, work.assignment.counts, purpose)
        self._ran = {number: ran for number, ran in self._ran.items() if number == self._communications - 1}
        self._ran[self._communications] = running
        if purpose == "train":
            others = (strategy for strategy in self._recent if strategy != work.strategy)
            self._recent = (work.strategy, *others)[:RECENT]
        preparer = self._session.preparer
        # Another number of micro-batches needs a new program but no new
        # graphs, so ranks need not agree again.
        if (work.strategy, purpose) in self._prepared:
            preparer.get(*running)
            return
        own: ValueError | None = None
        try:
            preparer.get(*running)
            if (check := self._compiled.check) is not None:
                program = self._compiled.variants.for_purpose(purpose).program
                (check if program is self._compiled.program else check.of(program)).check(work.strategy)
        except Exception as error:
            own = error if isinstance(error, ValueError) else _cannot_compile(error, work.strategy)
        # This rank raises its own error; others raise an `Unsupported` that quotes it.
        sent = own if own is None or isinstance(own, Unsupported) else _cannot_compile(own, work.strategy)
        raise_together(self._session.groups, own, sent)
        self._prepared.add((work.strategy, purpose))
        _LOG.info("prepared strategy %s (%s) for the first time, on all ranks", work.strategy, purpose)

    def _probes(self) -> bool:
        if not self.watched:
            return False
        self._probe.most_s = MOST_S if self._lasted is None else min(MOST_S, self._lasted / 2)
        # All ranks probe in the first step after a change of ranks; later,
        # only idle ranks do.
        idle = not self._session.preparer.get(*self._ran[self._communications]).program.roles
        return self._lasted is None or (idle and self.steps % PROBED_EVERY == 0)

    def _describe(self, rank: int, index: int, number: int) -> str:
        running = self._ran.get(number, next(reversed(self._ran.values()), None))
        if running is None:
            return ""
        if number > self._communications:
            return f"instruction {index} of the next step"
        return instruction_text(self._session.preparer.describe(*running, rank).instructions[index])


def _cannot_compile(error: Exception, strategy: Strategy) -> Unsupported:
    sentence = (str(error).splitlines() or [""])[0]
    refusal = Unsupported(
        f"it cannot be compiled ({type(error).__name__}: {sentence})",
        where=f"strategy {strategy}",
        remedy="choose another strategy; the failed rank's output shows the cause",
    )
    refusal.__cause__ = error
    return refusal

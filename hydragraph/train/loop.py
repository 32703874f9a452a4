"""The training loop that every rank runs; rank 0 alone writes metrics, pictures and the final model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hydragraph.candidates import Planning
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.flops import peak_flops_per_s, step_flops
from hydragraph.cost.profile import Profile
from hydragraph.cost.trace_file import TracedStep
from hydragraph.data import tokenizer
from hydragraph.data.mini_batches import Drawn, MiniBatches
from hydragraph.data.mixture import Mixture
from hydragraph.elastic.controller import Controller, Replanning
from hydragraph.elastic.estimate import Sensitivity
from hydragraph.elastic.events import Event, append_event, now, read_events
from hydragraph.elastic.following import Following, state_costs
from hydragraph.elastic.monitor import Monitor
from hydragraph.elastic.replanning import Replanned, Replanner
from hydragraph.errors import RankFailure, Stopped, TooFewRanks
from hydragraph.ir.program import Program
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import PlanRequest
from hydragraph.runtime.checkpoint.folder import prune
from hydragraph.runtime.checkpoint.manifest import Damaged
from hydragraph.runtime.checkpoint.sharing import leave_mark, see
from hydragraph.runtime.failure.agreement import Failure, raise_first
from hydragraph.runtime.launch import World, join
from hydragraph.runtime.meeting.member import CALLED, comes_late, elastic, here
from hydragraph.runtime.meeting.protocol import ALL_LEAVE
from hydragraph.runtime.stopping import Requests, Stopping
from hydragraph.runtime.trace import Exposed, RankTimes, Span, write_trace
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from hydragraph.survival import Survived, meet_again
from hydragraph.train.ahead import Ahead
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.checks import check_budget, check_settings, read_strategies, remarks
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import (
    Tokens,
    check_data,
    evaluation_batches,
    mini_batches,
    open_tokens,
    prepare,
    steps_of,
    verify,
)
from hydragraph.train.export import export
from hydragraph.train.folder import Begin, Checkpoint, RunFolder
from hydragraph.train.metrics import Metrics, MetricsLog, peak_memory, read_metrics, tensorboard_installed
from hydragraph.train.model import adapted, build_model, check_vocabulary, skeleton
from hydragraph.train.optimizer import learning_rate, optimizer_factory
from hydragraph.train.picture import matplotlib_installed, write_picture
from hydragraph.train.plan_input import read_costs
from hydragraph.train.ranks_file import ranks_of, write_ranks

T = TypeVar("T")

TAKEOVER_S = 5.0  # for the run's folder to be let go of by a rank that is lost
MOVES = (
    500  # what the rank that leads gives for `Executable.stopping` to have state go elsewhere; above signals' numbers
)
TRACED_STEPS = 12  # enough to see several strategies more than once


class StepResult(Protocol):
    """What a step of `Trainable` reports, equal on every rank."""

    step: int
    loss: float
    tokens: int
    grad_norm: float
    strategy: str
    sequences: int
    seconds: float
    micro_batches: tuple[int, ...]
    padding: int
    planning_s: float
    planning_hidden_s: float
    preparing_s: float
    expected_s: float
    exposed: Exposed
    assignment: Assignment
    chosen: Strategy
    ranks: tuple[RankTimes, ...]


class Trainable(Protocol):
    """What the loop needs of a compiled model."""

    optimizer: torch.optim.Optimizer
    spans: list[Span] | None
    decision: str
    stopping: int
    watched: bool
    program: Program
    profile: Profile | Costs | None
    strategies: tuple[Strategy, ...]
    request: PlanRequest
    owners: Home
    planning: Planning

    changing: bool
    change_refused: str

    def choose_from(
        self,
        strategies: Sequence[Strategy],
        request: PlanRequest,
        static: int | None = None,
        ready_first: bool = False,
    ) -> None:
        """Choose from other strategies from the next step on, or once all ranks are ready; rank 0 calls it."""

    def rehome(self, home: Home) -> None:
        """Let state go to another home beside the next step; all ranks call it."""

    def announce(self, sequences: Sequence[Drawn]) -> None:
        """Tell what a later step will bring."""

    def step(self, sequences: Sequence[Drawn], strategy: Strategy | None = None) -> Any:
        """Train on one global mini-batch; return a `StepResult`, or raise `Stopped` if any rank has `stopping`."""

    def evaluate(self, sequences: Sequence[Drawn], strategy: Strategy | None = None) -> Any:
        """Return a `StepResult` without updating anything."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on rank 0."""

    def save(self, path: Path, extra: dict[str, Any] | None = None, asynchronous: bool = False) -> None:
        """Write weights, optimizer state and `extra`, whole or not at all; beside training if asynchronous."""

    def wait_saved(self) -> None:
        """Return once what is being saved is in its place."""

    def load(self, path: Path) -> dict[str, Any]:
        """Read weights and optimizer state back, and return `extra`."""

    def load_pretrained(self, path: Path) -> None:
        """Read the weights of a Hugging Face directory, every rank its own."""

    @property
    def world(self) -> World:
        """This process's place among the ranks."""

    def close(self) -> None:
        """End the communication between the ranks."""


class Watcher(Protocol):
    """Who is told how a run goes, on rank 0."""

    def preparing(self, what: str, documents: int, part: float) -> None:
        """A corpus is being prepared; so many documents are done, which part of it (0: not known)."""

    def started(self, done: int, steps: int) -> None:
        """Training begins after `done` of `steps` steps."""

    def stepped(self, metrics: Metrics) -> None:
        """A step is done."""

    def note(self, sentence: str) -> None:
        """Something a user should know."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        folder: of the run.
        history: the metrics of all its steps, earlier sessions included; on rank 0 only.
        stopped: the signal that ended it early, after saving; 0 where it went to its end.
    """

    folder: RunFolder
    history: tuple[Metrics, ...] = ()
    stopped: int = 0


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same during a run."""

    config: TrainConfig
    world: World
    folder: RunFolder
    executor: Trainable
    strategies: tuple[Strategy, ...]  # that steps take in turn; none where the executor chooses
    evaluation: Mapping[str, list[list[Drawn]]]  # the mini-batches of every set, by its name
    watcher: Watcher | None  # on rank 0 only, as is the log
    log: MetricsLog | None
    controller: Controller | None  # on rank 0, where ranks are watched
    peak_flops_per_s: float | None = None  # of all ranks together, where each one's is known
    callbacks: Callbacks = field(default_factory=Callbacks)  # none but on rank 0
    saving: list[tuple[int, Path]] = field(default_factory=list)  # beside training
    traced: list[TracedStep] = field(default_factory=list)
    watched: tuple[int, ...] = ()  # the members that the controller knows, by their ranks then (`runtime.meeting`)


@dataclass
class _Course:
    """How far a run is, on every rank.

    Attributes:
        watcher: who is told of everything, on whichever rank leads.
        batches, anew: what mini-batches come from, and what gives them from the first again.
        coming: those that come next.
        done: steps that the state has had.
        saved: the step of the last checkpoint.
        kept: whether there is a checkpoint; that of before the first step counts.
        positions: of `batches` behind the mini-batch of a step, for steps since the checkpoint before the last.
        last: the last step that this rank has finished, and its report: perhaps nobody has written it down yet.
        owns: whether the run's folder is this process's own: to take over may fail half way, and is tried again.
        untold: how ranks met when another was lost before anybody had told of it, with how many there were before.
        began: when the run began that the folder holds; None: this process has never been one of its ranks.
    """

    watcher: Watcher
    batches: MiniBatches | Mixture
    anew: Callable[[], MiniBatches | Mixture]
    coming: Ahead
    done: int
    saved: int
    positions: dict[int, Mapping[str, Any]]
    last: tuple[int, StepResult] | None = None
    owns: bool = False
    kept: bool = False
    untold: list[tuple[Survived, int]] = field(default_factory=list)
    began: float | None = None


def train(
    config: TrainConfig,
    begin: Begin,
    compile: Callable[..., Any],
    watcher: Watcher,
    trace: bool = False,
    step: int | None = None,
    stopping: Requests | None = None,
) -> RunOutcome:
    """Run a whole training, on every rank of the launched ones or on this process alone.

    Args:
        config: the same on every rank.
        begin: a new run, a resumed one, or one that replaces what the folder holds.
        compile: `hydragraph.compile`.
        watcher: told of everything on rank 0.
        trace: record when each rank ran each instruction of the first steps, and write a picture of it for Perfetto.
        step: resume from the checkpoint after this step; None: from the latest that is whole.
        stopping: has the requests to stop that reach this process. One of them on any rank makes all save and return.

    Raises:
        ValueError: a mistake in the config, the data or the folder.
        OSError: the disk is full, the folder vanished, ...; the last checkpoint stays, and is named.
        FloatingPointError: a loss or gradient is not finite; nothing was updated, and the last checkpoint stays.
    """
    world = join(config.device)
    folder = RunFolder(Path(config.output))
    stopping = stopping or Stopping(config.grace_s)
    if comes_late():
        return _join_run(config, compile, watcher, world, folder, stopping)
    world.watch.progress_s = config.progress_s
    with world.calling("train"), ExitStack() as owned:

        def own() -> Checkpoint | None:
            last = folder.check(config, begin, step)
            owned.enter_context(folder.owned())
            return last

        # Before the slow part.
        last = _together(world, "taking the run's folder", world.rank == 0, own)[0]
        _refuse_apart(world, folder)
        start = _Start(begin, step, last)
        return _session(config, start, compile, watcher, trace, world, folder, stopping, owned)


@dataclass(frozen=True)
class _Start:
    """How a run begins: from which checkpoint, and whether that one was asked for by its step."""

    begin: Begin
    step: int | None
    last: Checkpoint | None


def _refuse_apart(world: World, folder: RunFolder) -> None:
    """Refuse hosts that have a folder of their own at the path of the run's, where no checkpoint could be whole."""
    mark = _together(world, "marking the run's folder", world.rank == 0, lambda: leave_mark(folder.path))[0]
    assert mark is not None
    try:
        _together(world, "looking into the run's folder", True, lambda: see(mark, f"output {folder.path}", world.rank))
    finally:
        if world.rank == 0:
            mark.unlink(missing_ok=True)


def _session(
    config: TrainConfig,
    start: _Start,
    compile: Callable[..., Any],
    watcher: Watcher,
    trace: bool,
    world: World,
    folder: RunFolder,
    stopping: Requests,
    owned: ExitStack,
) -> RunOutcome:
    """Run a training in a folder that is this run's own, which `owned` lets go of; other arguments as for `train`."""
    leader = watcher if world.rank == 0 else None
    _together(world, "checking the config", world.local_rank == 0, lambda: check_settings(config, world.ranks))
    _together(world, "looking into the data", world.local_rank == 0, lambda: check_data(config))
    tokens = shared_tokens(config, world, watcher)
    model = _model(config, tokens)
    strategies = () if config.automatic else read_strategies(config.strategies, model, world.ranks)
    given = config
    config = replace(config, steps=steps_of(config, mini_batches(config, tokens)), epochs=None)
    if start.last is not None and start.last.step > config.steps:
        raise ValueError(f"{start.last.path} is past the last step, {config.steps}: set epochs to more")
    anew = partial(mini_batches, config, tokens)
    batches = anew()
    check_budget(given, batches.tokens)
    evaluation = evaluation_batches(config, tokens) if config.evaluate_every else {}
    if leader is not None:
        for sentence in remarks(given, model, strategies, world.ranks, batches, config.steps):
            leader.note(sentence)
    executor = _compiled(config, compile, model, strategies, tokens, world)
    if config.model.weights is not None and start.last is None:
        executor.load_pretrained(Path(config.model.weights))
    with ExitStack() as stack:
        stack.enter_context(stopping.working())
        changed = folder.changes(config) if leader is not None and start.last is not None else ""
        # Once nothing else can be refused, because this may remove an earlier run.
        begin = partial(folder.begin, config, start.begin, start.step)
        last = _together(world, "beginning the run's folder", world.rank == 0, begin)[0]
        if leader is not None:
            tokenizer.copy(tokens.directory, folder.tokenizer)
        done = 0
        if last is not None:
            last, extra = _load(world, folder, executor, last, start.step is None, leader)
            batches.load_state_dict(extra["mini_batches"])
            done = last.step
        if leader is not None and last is not None:
            since = f"; changed since: {changed}" if changed else ""
            going_on = f"continuing after step {done} of {config.steps}, from {last.path}{since}"
            append_event(folder.happenings, Event(done, "resumed", tuple(range(world.ranks)), 0.0, going_on))
            leader.note(going_on)
        stack.enter_context(_naming_the_checkpoint(folder))
        log = stack.enter_context(_open_log(folder, done, leader)) if leader is not None else None
        executor.watched = config.elastic.on
        controller = _controller(config, world, executor) if config.elastic.on and leader is not None else None
        turns = () if config.plan.choose else strategies
        callbacks = Callbacks.load(config.callbacks if leader is not None else ())
        run = _Run(
            config, world, folder, executor, turns, evaluation, leader, log, controller, _peak(config, world), callbacks
        )
        if (member := here()) is not None:
            run = replace(run, watched=member.generation.members)
        if leader is not None:
            stack.callback(callbacks.call, "on_end")
            callbacks.call("on_start", config)
            if executor.decision:
                leader.note(executor.decision)
            leader.started(done, config.steps)
        positions: dict[int, Mapping[str, Any]] = {done: dict(batches.state_dict())}
        course = _Course(watcher, batches, anew, _ahead(run, batches), done, done, positions, owns=leader is not None)
        course.kept = last is not None
        course.began = folder.began
        executor.spans = [] if trace else None
        if controller is not None:
            stack.callback(controller.close)
        _write_ranks(run)
        return _follow(run, course, stopping, owned, model, tokens)


def _compiled(
    config: TrainConfig,
    compile: Callable[..., Any],
    model: nn.Module,
    strategies: tuple[Strategy, ...],
    tokens: Tokens,
    world: World,
    **joining: bool,
) -> Any:
    """Return the compiled model of a run; what `compile` takes beside that is for ranks that join."""
    return compile(
        model,
        optimizer=optimizer_factory(config.optimizer, model, world.device),
        **_chosen_from(config, strategies, tokens),
        max_grad_norm=config.max_grad_norm,
        dtype=getattr(torch, config.dtype),
        device=world.device,
        backend=config.backend,
        check=config.check,
        compiled=config.compiled,
        trust=config.trust,
        progress_s=config.progress_s,
        home=config.home,
        deterministic=config.deterministic,
        **joining,
    )


def _join_run(
    config: TrainConfig,
    compile: Callable[..., Any],
    watcher: Watcher,
    world: World,
    folder: RunFolder,
    stopping: Requests,
) -> RunOutcome:
    """Get ready alone, beside ranks that train already; then join them between two steps."""
    tokens = open_tokens(config, prepare(config))
    model = (
        skeleton(config.model, tokens.vocabulary, tokens.end_of_text)
        if config.adapter is None
        else _model(config, tokens)
    )
    strategies = () if config.automatic else read_strategies(config.strategies, model, config.ranks)
    anew = partial(mini_batches, config, tokens)
    batches = anew()
    config = replace(config, steps=steps_of(config, batches), epochs=None)
    evaluation = evaluation_batches(config, tokens) if config.evaluate_every else {}
    executor = _compiled(config, compile, model, strategies, tokens, world, joining=True)
    executor.watched = config.elastic.on
    turns = () if config.plan.choose else strategies
    run = _Run(config, world, folder, executor, turns, evaluation, None, None, None, None)
    course = _Course(watcher, batches, anew, _ahead(run, batches), -1, -1, {})
    with ExitStack() as owned, stopping.working(), _naming_the_checkpoint(folder):
        return _follow(run, course, stopping, owned, model, tokens)


def _ahead(run: _Run, batches: MiniBatches | Mixture) -> Ahead:
    """Read mini-batches as far ahead as they are planned."""
    plan = run.config.plan
    return Ahead(batches, plan.ahead if plan.choose else 0, run.executor.announce)


def _follow(
    run: _Run, course: _Course, stopping: Requests, owned: ExitStack, model: nn.Module, tokens: Tokens
) -> RunOutcome:
    """Train to the end, on these ranks or on those that are left when some are lost and those that join."""
    failure: RankFailure | Stopped | None = None
    changed = course.done < 0  # a newcomer
    while True:
        try:
            ending = ""
            if changed:
                run, ending = _go_on(run, course, failure, owned)
                changed = False
            with run.world.calling("train"):
                if ending:
                    return _end_early(run, course, ending)
                if elastic() and not course.done and not course.kept:
                    _checkpoint(run, course)  # what all go back to where state is lost before the first that is due
                stopped = _steps(run, course, stopping)
                if run.executor.spans is not None:
                    _write_trace(run)
                if run.config.checkpoint.asynchronous:
                    _settle_checkpoints(run)
                if not stopped:
                    _finish(run, model, tokens)
                if elastic():
                    run.world.gather(None)  # whoever fails up to here meets the others again, and they end together
            break
        except (RankFailure, Stopped) as error:
            if not elastic():
                raise
            failure, changed = error, True
    run.executor.close()
    return RunOutcome(run.folder, tuple(run.log.history) if run.log is not None else (), stopped)


def _go_on(run: _Run, course: _Course, failure: BaseException | None, owned: ExitStack) -> tuple[_Run, str]:
    """Meet the ranks that are left and those that have come; return the run on them, and why it is to end, or ""."""
    config, folder, executor = run.config, run.folder, run.executor
    watching, before = run.controller, run.world.ranks

    def newest() -> Path | None:
        last = folder.last()
        return None if last is None else last.path

    compiled: Any = executor  # a Trainable that was compiled
    health = Health() if watching is None else watching.monitor.health
    rates = {run.watched[rank]: health.rate(rank) for rank in health}
    survived = meet_again(compiled, failure, newest, _soon(config), rates)
    world = executor.world
    turns = () if config.plan.choose else survived.strategies
    last, idle_s = course.done, 0.0
    if last < 0 and world.rank == 0:  # it has come, and nobody is left
        before, (last, idle_s) = len(survived.lost), _written(folder)
    lost_to = None if survived.restored is None else last
    run = replace(run, world=world, strategies=turns, controller=None, watcher=None)
    course.untold.append((survived, before))
    with world.calling("go on"):
        if world.rank == 0:
            run = _lead(run, course, survived, owned, watching)
        elif watching is not None:
            watching.close()
        course.done, course.began = survived.step, folder.began
        _find_position(run, course)
        _write_down(run, course)
        _write_ranks(run)
        moved = sum(world.gather(survived.received))
        told, course.untold = course.untold, []
        took = max(world.gather(_paused(told, world.rank)))
        if run.watcher is not None:
            for event in (*_changes_of(told), _resumed(told, world.ranks, lost_to, moved, took or idle_s)):
                _tell(run, event)
        if not survived.ending and _unsaved(run, course):
            _checkpoint(run, course)
    return run, survived.ending


def _soon(config: TrainConfig) -> bool:
    """Say whether ranks go on with a good plan at once, because the best is looked for beside training."""
    return config.elastic.on and config.elastic.replan and not config.elastic.dry_run


def _lead(run: _Run, course: _Course, survived: Survived, owned: ExitStack, watching: Controller | None) -> _Run:
    """Be the rank that writes: take over what a lost one did, or go on with it.

    Args:
        run, course, survived: how things are.
        owned: ends what this rank begins.
        watching: this rank's own controller of the ranks there were; its process that plans is kept.
    """
    log = run.log
    if not course.owns:
        owned.enter_context(run.folder.taken_over(TAKEOVER_S, course.began))
        course.owns = True
    if log is None:
        run = replace(run, callbacks=Callbacks.load(run.config.callbacks))
        owned.callback(run.callbacks.call, "on_end")
    if log is None or survived.restored is not None:
        if log is not None:
            log.__exit__(None, None, None)
        log = owned.enter_context(_open_log(run.folder, survived.step, course.watcher))
        course.watcher.started(survived.step, run.config.steps)
    run = replace(run, log=log, watcher=course.watcher)
    if run.config.elastic.on:
        hurried = _soon(run.config) and isinstance(run.executor.profile, Costs)
        members = tuple(peer.member for peer in survived.peers)
        numbers = {before: members.index(m) for before, m in enumerate(run.watched) if m in members}
        controller = _controller(run.config, run.world, run.executor, watching, numbers, hurried)
        owned.callback(controller.close)
        run = replace(run, controller=controller, watched=members)
    return run


def _find_position(run: _Run, course: _Course) -> None:
    """Go back to behind the last mini-batch that counts, which a newcomer is told."""
    known = run.world.gather(course.positions.get(course.done))
    position = next((each for each in known if each is not None), None)
    if position is None:  # all that knew are gone: draw all mini-batches anew
        course.batches = course.anew()
        for _ in range(course.done):
            next(course.batches)
        position = dict(course.batches.state_dict())
    course.batches.load_state_dict(dict(position))
    course.positions = {step: at for step, at in course.positions.items() if step < course.done}
    course.positions[course.done] = position
    course.coming = _ahead(run, course.batches)


def _write_down(run: _Run, course: _Course) -> None:
    """Evaluate and log the last step, if the rank that was to has not."""
    missing = run.log is not None and (run.log.history[-1].step if run.log.history else 0) < course.done
    mine = course.last if course.last is not None and course.last[0] == course.done else None
    told = run.world.gather((missing, mine))
    last = next((each for _, each in told if each is not None), None)
    if told[0][0] and last is not None:
        _log_step(run, *last)


def _unsaved(run: _Run, course: _Course) -> bool:
    """Say whether the checkpoint after the last step is due, and not there; on all ranks alike."""
    last = run.folder.last() if run.world.rank == 0 else None
    there = run.world.gather(-1 if last is None else last.step)[0]
    course.saved = max(there, 0)
    course.kept = there >= 0
    return there < course.done and course.done > 0 and _due(course.done, run.config.checkpoint_every, run.config.steps)


def _end_early(run: _Run, course: _Course, ending: str) -> RunOutcome:
    """Save what is there, and end: with an error, unless all were asked to."""
    if course.saved < course.done:
        _checkpoint(run, course)
    if run.config.checkpoint.asynchronous:
        _settle_checkpoints(run)
    run.executor.close()
    if ending != ALL_LEAVE:
        raise TooFewRanks(f"{ending}: saved after step {course.done}, in {run.folder.place(course.done)} (--resume)")
    return RunOutcome(run.folder, tuple(run.log.history) if run.log is not None else (), signal.SIGTERM)


def _write_ranks(run: _Run) -> None:
    """Tell which processes are the ranks; all of them call it."""
    ranks = ranks_of(run.world)
    if run.log is not None:
        write_ranks(run.folder.ranks, ranks)


def _changes_of(told: Sequence[tuple[Survived, int]]) -> Iterator[Event]:
    """Yield who was lost, left and came; each with how many ranks there were before."""
    for survived, before in told:
        step, now = survived.step, len(survived.peers)
        if survived.lost:
            yield Event(step, "fault", survived.lost, 0.0, survived.why)
        if survived.left:
            yield Event(step, "leave", survived.left, 0.0, f"asked to end; handed over their state: {survived.why}")
        if survived.joined:
            yield Event(step, "join", survived.joined, 0.0, f"{before} -> {now} ranks")


def _paused(told: Sequence[tuple[Survived, int]], rank: int) -> float:
    """Return how long this rank did not train, in seconds; 0 where it has come, and only waited to be needed."""
    return sum(survived.seconds for survived, _ in told if rank not in survived.joined)


def _written(folder: RunFolder) -> tuple[int, float]:
    """Return the last step that was written down, and the seconds since then; 0 where none was."""
    with suppress(FileNotFoundError):
        done = [metrics.step for metrics in read_metrics(folder.metrics)[-1:]]
        return done[0] if done else 0, max(0.0, time.time() - folder.metrics.stat().st_mtime)
    return 0, 0.0


def _resumed(told: Sequence[tuple[Survived, int]], ranks: int, undone: int | None, moved: int, seconds: float) -> Event:
    """Return how ranks went on.

    Args:
        told: how they met, the last time with success.
        ranks: how many there are.
        undone: the last step before, where all went back to a checkpoint.
        moved: bytes of state between ranks.
        seconds: that nobody trained.
    """
    survived, _ = told[-1]
    step = survived.step
    strategies = " or ".join(map(str, survived.strategies))
    state = f"no state was lost, and {moved / 1e6:.3g} MB of it moved"
    lost = 0
    if survived.restored is not None:
        lost = 0 if undone is None else max(0, undone - survived.restored)
        redone = "" if undone is None else f", {lost} steps before"
        state = f"state was lost, so all went back to the checkpoint after step {survived.restored}{redone}"
    why = f"{ranks} ranks go on after step {step} with {strategies}; {state}"
    return Event(step, "resumed", tuple(range(ranks)), seconds, why, lost_steps=lost, moved_bytes=moved)


def _load(
    world: World, folder: RunFolder, executor: Trainable, last: Checkpoint, fall_back: bool, leader: Watcher | None
) -> tuple[Checkpoint, dict[str, Any]]:
    """Load a checkpoint, or where it is damaged the newest before it that is not; return which, and its extra."""
    while True:
        try:
            return last, executor.load(last.path)
        except ValueError as error:  # raised on all ranks, but perhaps as Damaged only where the damage was seen
            if not any(world.gather(isinstance(error, Damaged))) or not fall_back:
                raise
            reason = error
        earlier = _together(
            world, "setting a checkpoint aside", world.rank == 0, partial(folder.replace_damaged, last)
        )[0]
        if earlier is None:
            raise reason
        last = earlier
        if leader is not None:
            leader.note(f"DAMAGED, and set aside: {reason}; trying {last.path}")


def _steps(run: _Run, course: _Course, stopping: Requests) -> int:
    """Train to the end or until a rank is asked to stop; return what asked, or 0."""
    config = run.config
    executor = run.executor
    first = course.done + 1
    for step in range(first, config.steps + 1):
        if executor.spans is not None and step == first + TRACED_STEPS:
            _write_trace(run)
        sequences = course.coming.take(last=step + config.plan.ahead > config.steps)
        try:
            while not _trained(run, course, step, sequences, stopping.signal):
                _rehome(run)
        except Stopped as request:
            if request.reason >= CALLED:
                raise
            if course.saved < step - 1:
                _checkpoint(run, course)
            return request.reason
        if _due(step, config.checkpoint_every, config.steps):
            _checkpoint(run, course)
    return 0


def _trained(run: _Run, course: _Course, step: int, sequences: list[Drawn], signal: int) -> bool:
    """Train on a mini-batch, unless the rank that leads has called for state to go elsewhere, or one is to stop."""
    following = run.controller.following if run.controller is not None else None
    moves = following is not None and following.next is not None
    run.executor.stopping = MOVES if moves else signal
    try:
        _train_step(run, course, step, sequences)
    except Stopped as request:
        if request.reason != MOVES:
            raise
        return False
    return True


def _rehome(run: _Run) -> None:
    """Let a part of the state go to where it is to live, beside the next step; all ranks call it."""
    following = run.controller.following if run.controller is not None else None
    home = run.world.gather(None if following is None else following.next)[0]
    assert home is not None, "the rank that leads has called for it"
    run.executor.stopping = 0
    run.executor.rehome(home)
    if following is not None:
        following.begun()


@contextmanager
def _naming_the_checkpoint(folder: RunFolder) -> Iterator[None]:
    """Add to what goes wrong with files how the run can be continued."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise  # OSErrors, but not of files
    except OSError as error:
        where = "" if error.errno is None or error.filename is not None else f": '{folder.path}'"
        raise OSError(f"{error}{where}; {folder.how_to_go_on}") from error


def _chosen_from(config: TrainConfig, strategies: tuple[Strategy, ...], tokens: Tokens) -> dict[str, Any]:
    """Return what `compile` is told of strategies: the first of those that take turns, or all to choose from."""
    if not config.plan.choose:
        return {"strategy": strategies[0]}
    plan = config.plan
    batches = mini_batches(config, tokens)
    return {
        "strategy": "auto" if config.automatic else strategies,
        "profile": read_costs(plan, config.ranks),
        "lengths": [list(batches.skip()) for _ in range(plan.sample)],
        "policy": _policy(config),
    }


def _controller(
    config: TrainConfig,
    world: World,
    executor: Trainable,
    before: Controller | None = None,
    numbers: Mapping[int, int] | None = None,
    hurried: bool = False,
) -> Controller:
    """Return what watches the ranks, by measured costs or, without any, by the model's operations on equal devices.

    Args:
        config, world, executor: of the run.
        before: of the ranks that there were: what it knows of those that stay counts, and its process that plans stays.
        numbers: of those that stay, by the numbers they had.
        hurried: whether what runs was found at once, so that the best is to be looked for.
    """
    known, home = executor.profile, executor.owners  # of the ranks that there are now
    if isinstance(known, Costs):
        costs = known.changed(home=home)
    elif known is not None:
        costs = Costs(known, known.cluster(world.ranks), home=home)
    else:
        cluster = default_cluster(world.ranks)
        costs = Costs(datasheet(executor.program, cluster), cluster, home=home)
    if before is None:
        monitor = Monitor(costs, Sensitivity(config.elastic.enter, config.elastic.leave))
    else:
        monitor = before.monitor.among(costs, numbers or {})
    planner = None if before is None else before.released()
    if not config.elastic.replan:
        return Controller(monitor)

    def switch(answer: Replanned) -> None:
        assert answer.request is not None, "an answer that is not refused has a request"
        executor.choose_from(answer.strategies, answer.request, answer.static, ready_first=True)

    following = Following(
        executor.owners,
        world.ranks,
        executor.program.buckets,
        state_costs(costs),
        config.steps,
        config.elastic.dry_run,
        costs,
    )
    return Controller(
        monitor,
        Replanning(
            costs,
            executor.strategies,
            executor.request,
            _policy(config),
            planner or Replanner(),
            None if config.elastic.dry_run else switch,
            config.steps,
            changing=lambda: executor.changing,
            refused=lambda: executor.change_refused,
            sample=tuple(tuple(lengths) for lengths in executor.planning.lengths or ()),
            hurried=hurried,
            planned_for=monitor.health if hurried else Health(),
        ),
        following if world.ranks > 1 else None,
    )


def _policy(config: TrainConfig) -> Policy:
    plan = config.plan
    # `Ahead` announces so many mini-batches beyond the one that is trained, and the planner counts that one, too.
    return Policy(plan.gain, plan.sample, plan.workers, plan.ahead + 1, plan.patience_s, config.seed)


def _model(config: TrainConfig, tokens: Tokens) -> nn.Module:
    """Return the model, on the meta device where each rank is to read its own part of the weights."""
    vocabulary = tokens.vocabulary
    end_of_text = tokens.end_of_text
    if config.model.weights is None:
        return adapted(build_model(config.model, vocabulary, end_of_text, config.seed), config.adapter, config.seed)
    model = skeleton(config.model, vocabulary, end_of_text)
    check_vocabulary(config.model, model, vocabulary)
    return model


def shared_tokens(config: TrainConfig, world: World, watcher: Watcher) -> Tokens:
    """Return the corpus, prepared and read through by one rank of each host, and make sure that all have the same.

    Raises:
        ValueError: the corpus cannot be used, a host's copy of it is damaged, or hosts differ.
    """
    watched = watcher.preparing
    reads = world.local_rank == 0
    _together(world, "preparing the data", reads, lambda: verify(config, prepare(config, watched), watched))
    tokens = open_tokens(config, prepare(config))
    fingerprints = world.gather(tokens.fingerprint)
    if len(set(fingerprints)) > 1:
        different = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
        raise ValueError(f"data: rank {different} read another corpus than rank 0: give every host the same files")
    return tokens


def _train_step(run: _Run, course: _Course, step: int, sequences: list[Drawn]) -> None:
    """Train on one mini-batch, evaluate where it is time, and log both."""
    config = run.config
    strategy = run.strategies[(step - 1) % len(run.strategies)] if run.strategies else None
    lr = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
    for group in run.executor.optimizer.param_groups:
        group["lr"] = lr
    try:
        report: StepResult = run.executor.step(sequences, strategy)
    except FloatingPointError as error:
        if config.checkpoint.asynchronous:
            run.executor.wait_saved()  # all ranks are here, and it may be the last checkpoint
        raise FloatingPointError(f"step {step}: {error}; {run.folder.how_to_go_on}") from None
    course.last = (step, report)
    course.done = step
    course.positions[step] = dict(course.coming.position)
    if not elastic():
        course.positions = {step: course.positions[step]}
    if run.executor.spans is not None:
        seconds = report.seconds - report.planning_s
        run.traced.append(TracedStep(report.step, report.strategy, report.assignment, seconds))
    _log_step(run, step, report)


def _log_step(run: _Run, step: int, report: StepResult) -> None:
    """Evaluate after a step where it is time, and log both."""
    config = run.config
    strategy = run.strategies[(step - 1) % len(run.strategies)] if run.strategies else None
    evaluate = config.evaluate_every and _due(step, config.evaluate_every, config.steps)
    losses = _evaluate(run, strategy) if evaluate else {}
    if run.log is None or run.watcher is None:
        return
    metrics = Metrics(
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=learning_rate(step, config.steps, config.optimizer.lr, config.schedule),
        tokens=report.tokens,
        tokens_per_s=report.tokens / report.seconds,
        seconds=report.seconds,
        strategy=report.strategy,
        sequences=report.sequences,
        micro_batches=tuple(report.micro_batches),
        eval_loss=losses.get("heldout", next(iter(losses.values()), None)),
        eval_losses=losses,
        padding=report.padding,
        exposed_pull_s=report.exposed.pull,
        exposed_push_s=report.exposed.push,
        exposed_p2p_s=report.exposed.p2p,
        planning_s=report.planning_s,
        planning_hidden_s=report.planning_hidden_s,
        expected_s=report.expected_s,
        peak_memory_bytes=peak_memory(run.world.device),
        mfu=_mfu(run, report),
        time=now(),
    )
    run.log.write(metrics)
    run.watcher.stepped(metrics)
    run.callbacks.call("on_step", metrics)
    if losses:
        run.callbacks.call("on_evaluate", metrics)
    for event in run.controller.stepped(report) if run.controller is not None else ():
        _tell(run, event)


def _tell(run: _Run, event: Event) -> None:
    """Write down what happened, on the rank that leads, wherever it is looked for."""
    append_event(run.folder.happenings, event)
    if run.log is not None:
        run.log.mark(event)
    if run.watcher is not None:
        run.watcher.note(str(event))


def _peak(config: TrainConfig, world: World) -> float | None:
    """Return the FLOP/s that the GPUs of all ranks together reach at most; None where one's datasheet is not known."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peaks = world.gather(peak_flops_per_s(name, getattr(torch, config.dtype)))
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def _mfu(run: _Run, report: StepResult) -> float | None:
    if run.peak_flops_per_s is None:
        return None
    flops = step_flops(run.executor.program, [n for n in report.assignment.lengths if n])
    return flops / report.seconds / run.peak_flops_per_s


def _evaluate(run: _Run, strategy: Strategy | None) -> dict[str, float]:
    """Return the mean loss per token over the mini-batches of every set."""
    losses: dict[str, float] = {}
    for name, batches in run.evaluation.items():
        reports: list[StepResult] = [run.executor.evaluate(sequences, strategy) for sequences in batches]
        losses[name] = sum(r.loss * r.tokens for r in reports) / sum(r.tokens for r in reports)
    return losses


def _checkpoint(run: _Run, course: _Course) -> None:
    """Save everything that resuming needs, and the picture so far."""
    began = time.monotonic()
    step = course.done
    place = run.folder.place(step)
    extra = {"mini_batches": dict(course.positions[step])}
    if run.config.checkpoint.asynchronous:
        _settle_checkpoints(run)
        run.executor.save(place, extra, asynchronous=True)
        run.saving.append((step, place))
    else:
        run.executor.save(place, extra)
        run.callbacks.call("on_checkpoint", step, place)
        _prune(run)
    before, course.saved = course.saved, step
    course.kept = True
    course.positions = {number: at for number, at in course.positions.items() if number >= before}
    if run.log is not None:
        why = f"in {place}" + (", beside training" if run.config.checkpoint.asynchronous else "")
        everybody = tuple(range(run.world.ranks))
        append_event(run.folder.happenings, Event(step, "saved", everybody, time.monotonic() - began, why))
    if run.log is not None and run.log.history and matplotlib_installed():
        write_picture(run.log.history, run.folder.picture, read_events(run.folder.happenings))


def _settle_checkpoints(run: _Run) -> None:
    """Wait for what is being saved, and drop what it makes too old; never while something is being saved."""
    run.executor.wait_saved()
    while run.saving:
        run.callbacks.call("on_checkpoint", *run.saving.pop())
    _prune(run)


def _prune(run: _Run) -> None:
    """Keep the newest checkpoints."""
    if run.log is not None:
        prune(run.folder.checkpoints, run.config.keep)


def _write_trace(run: _Run) -> None:
    """Gather the ranks' spans, write them, and record no more."""
    per_rank = run.world.gather(run.executor.spans or [])
    run.executor.spans = None
    if run.watcher is not None:
        write_trace(per_rank, run.folder.trace, run.traced)
        run.watcher.note(
            f"{run.folder.trace}: the times of all instructions; open it at https://ui.perfetto.dev, or hold it "
            "against the cost model with hydragraph compare"
        )


def _finish(run: _Run, model: nn.Module, tokens: Tokens) -> None:
    """Write the final model."""
    state = run.executor.full_state_dict()
    if run.log is not None:
        export(model, state, tokens.directory, run.folder.model)


def _open_log(folder: RunFolder, done: int, watcher: Watcher) -> MetricsLog:
    """Open the log, telling what is left out because a package is missing."""
    remedy = "pip install 'hydragraph[train]'"
    if not matplotlib_installed():
        watcher.note(f"no picture of the loss: matplotlib is not installed ({remedy})")
    if not tensorboard_installed():
        watcher.note(f"no TensorBoard events: tensorboard is not installed ({remedy})")
    return MetricsLog(folder.metrics, folder.events if tensorboard_installed() else None, done)


def _due(step: int, every: int, steps: int) -> bool:
    """Say whether something that happens every so many steps (0: at the end only) is due."""
    return step == steps or (every > 0 and step % every == 0)


def _together(world: World, what: str, acts: bool, make: Callable[[], T]) -> list[T | None]:
    """Call a function on the ranks that act, and return every rank's result; an error on one is raised on all.

    Args:
        what: this is, for the ranks on which nothing failed.
        acts: whether this rank calls it.
    """
    value: T | None = None
    error: Exception | None = None
    if acts:
        try:
            value = make()
        except Exception as raised:
            error = raised
    outcomes = world.gather((value, None if error is None else Failure.of(error)))
    raise_first({rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}, error, what)
    return [value for value, _ in outcomes]

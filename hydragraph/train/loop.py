"""The training loop that every rank runs; rank 0 alone writes metrics, pictures and the final model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.flops import peak_flops_per_s, step_flops
from hydragraph.cost.profile import Profile
from hydragraph.cost.trace_file import TracedStep
from hydragraph.data import tokenizer
from hydragraph.data.mini_batches import Drawn, length_of
from hydragraph.elastic.controller import Controller, Replanning
from hydragraph.elastic.estimate import Sensitivity
from hydragraph.elastic.events import append_event, read_events
from hydragraph.elastic.monitor import Monitor
from hydragraph.elastic.replanning import Replanned, Replanner
from hydragraph.errors import Stopped
from hydragraph.ir.program import Program
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import PlanRequest
from hydragraph.runtime.checkpoint.folder import prune
from hydragraph.runtime.checkpoint.manifest import Damaged
from hydragraph.runtime.checkpoint.sharing import leave_mark, see
from hydragraph.runtime.failure.agreement import Failure, raise_first
from hydragraph.runtime.launch import World, join
from hydragraph.runtime.stopping import Stopping
from hydragraph.runtime.trace import Exposed, RankTimes, Span, write_trace
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.ahead import Ahead
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.checks import check_settings, read_strategies, remarks
from hydragraph.train.config import PlanConfig, TrainConfig
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
from hydragraph.train.metrics import Metrics, MetricsLog, peak_memory, tensorboard_installed
from hydragraph.train.model import adapted, build_model, check_vocabulary, skeleton
from hydragraph.train.optimizer import learning_rate, optimizer_factory
from hydragraph.train.picture import matplotlib_installed, write_picture

T = TypeVar("T")

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
    strategies: tuple[Strategy, ...]
    request: PlanRequest

    def choose_from(self, strategies: Sequence[Strategy], request: PlanRequest, static: int | None = None) -> None:
        """Choose from other strategies from the next step on; rank 0 calls it."""

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

    def close(self) -> None:
        """End the communication between the ranks."""


class Watcher(Protocol):
    """Who is told how a run goes, on rank 0."""

    def preparing(self, what: str, documents: int) -> None:
        """A corpus is being prepared."""

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


def train(
    config: TrainConfig,
    begin: Begin,
    compile: Callable[..., Any],
    watcher: Watcher,
    trace: bool = False,
    step: int | None = None,
    stopping: Stopping | None = None,
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
        return _session(config, start, compile, watcher, trace, world, folder, stopping or Stopping(config.grace_s))


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
    stopping: Stopping,
) -> RunOutcome:
    """Run a training in a folder that is this run's own; arguments as for `train`."""
    leader = watcher if world.rank == 0 else None
    _together(world, "checking the config", world.local_rank == 0, lambda: check_settings(config, world.ranks))
    _together(world, "looking into the data", world.local_rank == 0, lambda: check_data(config))
    tokens = shared_tokens(config, world, watcher)
    model = _model(config, tokens)
    strategies = () if config.automatic else read_strategies(config.strategies, model, world.ranks)
    factory = optimizer_factory(config.optimizer, model, world.device)
    config = replace(config, steps=steps_of(config, mini_batches(config, tokens)), epochs=None)
    if start.last is not None and start.last.step > config.steps:
        raise ValueError(f"{start.last.path} is past the last step, {config.steps}: set epochs to more")
    batches = mini_batches(config, tokens)
    evaluation = evaluation_batches(config, tokens) if config.evaluate_every else {}
    if leader is not None:
        for sentence in remarks(config, model, strategies, world.ranks, batches):
            leader.note(sentence)
    executor = compile(
        model,
        optimizer=factory,
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
    )
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
            leader.note(f"continuing after step {done} of {config.steps}, from {last.path}{since}")
        stack.enter_context(_naming_the_checkpoint(folder))
        log = stack.enter_context(_open_log(folder, done, leader)) if leader is not None else None
        executor.watched = config.elastic.on
        controller = _controller(config, world, executor) if config.elastic.on and leader is not None else None
        turns = () if config.plan.choose else strategies
        callbacks = Callbacks.load(config.callbacks if leader is not None else ())
        run = _Run(
            config, world, folder, executor, turns, evaluation, leader, log, controller, _peak(config, world), callbacks
        )
        if leader is not None:
            stack.callback(callbacks.call, "on_end")
            callbacks.call("on_start", config)
            if executor.decision:
                leader.note(executor.decision)
            leader.started(done, config.steps)
        coming = Ahead(batches, config.plan.ahead if config.plan.choose else 0, executor.announce)
        executor.spans = [] if trace else None
        if controller is not None:
            stack.callback(controller.close)
        stopped = _steps(run, done, coming, stopping)
        if executor.spans is not None:
            _write_trace(run)
        if config.checkpoint.asynchronous:
            _settle_checkpoints(run)
        if not stopped:
            _finish(run, model, tokens)
        executor.close()
        return RunOutcome(folder, tuple(log.history) if log is not None else (), stopped)


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


def _steps(run: _Run, done: int, coming: Ahead, stopping: Stopping) -> int:
    """Train after `done` steps, to the end or until a rank is asked to stop; return what asked, or 0."""
    config = run.config
    executor = run.executor
    saved = done
    for step in range(done + 1, config.steps + 1):
        if executor.spans is not None and (step == done + 1 + TRACED_STEPS):
            _write_trace(run)
        position = coming.position
        sequences = coming.take(last=step + config.plan.ahead > config.steps)
        executor.stopping = stopping.signal
        try:
            _train_step(run, step, sequences)
        except Stopped as request:
            if saved < step - 1:
                _checkpoint(run, step - 1, position)
            return request.reason
        if _due(step, config.checkpoint_every, config.steps):
            _checkpoint(run, step, coming.position)
            saved = step
    return 0


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
        "profile": _measured(plan),
        "lengths": [list(batches.skip()) for _ in range(plan.sample)],
        "policy": _policy(config),
    }


def _measured(plan: PlanConfig) -> Profile | Costs | None:
    """Return what choosing goes by: a profile of devices that are alike, or costs of those of a cluster."""
    if plan.profile is None:
        return None
    profile = Profile.load(plan.profile)
    if plan.cluster is None:
        return profile
    health = None if plan.health is None else Health.load(plan.health)
    return Costs(profile, Cluster.load(plan.cluster), health)


def _controller(config: TrainConfig, world: World, executor: Trainable) -> Controller:
    """Return what watches the ranks, by measured costs or, without any, by the model's operations on equal devices."""
    known = _measured(config.plan)
    if isinstance(known, Costs):
        costs = known.changed(home=config.home)
    elif known is not None:
        costs = Costs(known, known.cluster(world.ranks), home=config.home)
    else:
        cluster = default_cluster(world.ranks)
        costs = Costs(datasheet(executor.program, cluster), cluster, home=config.home)
    monitor = Monitor(costs, Sensitivity(config.elastic.enter, config.elastic.leave))
    if not config.elastic.replan:
        return Controller(monitor)

    def switch(answer: Replanned) -> None:
        assert answer.request is not None, "an answer that is not refused has a request"
        executor.choose_from(answer.strategies, answer.request, answer.static)

    return Controller(
        monitor,
        Replanning(
            costs,
            executor.strategies,
            executor.request,
            _policy(config),
            Replanner(),
            None if config.elastic.dry_run else switch,
            config.steps,
        ),
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


def _train_step(run: _Run, step: int, sequences: list[Drawn]) -> None:
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
    if run.executor.spans is not None:
        seconds = report.seconds - report.planning_s
        run.traced.append(TracedStep(report.step, report.strategy, report.assignment, seconds))
    evaluate = config.evaluate_every and _due(step, config.evaluate_every, config.steps)
    losses = _evaluate(run, strategy) if evaluate else {}
    if run.log is None or run.watcher is None:
        return
    metrics = Metrics(
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=lr,
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
        mfu=_mfu(run, sequences, report),
    )
    run.log.write(metrics)
    run.watcher.stepped(metrics)
    run.callbacks.call("on_step", metrics)
    if losses:
        run.callbacks.call("on_evaluate", metrics)
    for event in run.controller.stepped(report) if run.controller is not None else ():
        append_event(run.folder.happenings, event)
        run.watcher.note(str(event))


def _peak(config: TrainConfig, world: World) -> float | None:
    """Return the FLOP/s that the GPUs of all ranks together reach at most; None where one's datasheet is not known."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peaks = world.gather(peak_flops_per_s(name, getattr(torch, config.dtype)))
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def _mfu(run: _Run, sequences: Sequence[Drawn], report: StepResult) -> float | None:
    if run.peak_flops_per_s is None:
        return None
    flops = step_flops(run.executor.program, [length_of(sequence) for sequence in sequences])
    return flops / report.seconds / run.peak_flops_per_s


def _evaluate(run: _Run, strategy: Strategy | None) -> dict[str, float]:
    """Return the mean loss per token over the mini-batches of every set."""
    losses: dict[str, float] = {}
    for name, batches in run.evaluation.items():
        reports: list[StepResult] = [run.executor.evaluate(sequences, strategy) for sequences in batches]
        losses[name] = sum(r.loss * r.tokens for r in reports) / sum(r.tokens for r in reports)
    return losses


def _checkpoint(run: _Run, step: int, position: Mapping[str, Any]) -> None:
    """Save everything that resuming needs, and the picture so far."""
    place = run.folder.place(step)
    extra = {"mini_batches": dict(position)}
    if run.config.checkpoint.asynchronous:
        _settle_checkpoints(run)
        run.executor.save(place, extra, asynchronous=True)
        run.saving.append((step, place))
    else:
        run.executor.save(place, extra)
        run.callbacks.call("on_checkpoint", step, place)
        _prune(run)
    if run.log is not None and matplotlib_installed():
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

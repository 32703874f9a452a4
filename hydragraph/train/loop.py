"""Training loop of every rank."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydragraph.checkpoint.manifest import check_model, read_manifest
from hydragraph.checkpoint.optimizer_state import kind_of
from hydragraph.checkpoint.save_and_load import read_extra
from hydragraph.checkpoint.shared_directory import leave_mark, see
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.launch import World, apart, join
from hydragraph.cluster.processes.restart_cache import keep, kept
from hydragraph.cluster.processes.stop_requests import Requests, Stopping
from hydragraph.cluster.rendezvous.member import CALLED, comes_late, elastic, here
from hydragraph.cluster.rendezvous.protocol import ALL_LEAVE
from hydragraph.cluster.shared_outcome import together
from hydragraph.cost.trace_file import TracedStep, TraceEvent
from hydragraph.data import tokenizer
from hydragraph.data.mini_batches import Drawn, Mixture
from hydragraph.engine.step_report import StepReport
from hydragraph.errors import RankFailure, Stopped, TooFewRanks
from hydragraph.spec.strategy import Strategy
from hydragraph.train.best_evaluation import lowest
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.config import TrainConfig
from hydragraph.train.config_checks import check_budget, check_settings, read_strategies, remarks
from hydragraph.train.data import (
    PreparedCorpus,
    check_data,
    data_remarks,
    evaluation_batches,
    evaluation_streams,
    length_remarks,
    mini_batches,
    open_tokens,
    parts_of_epochs,
    prepare,
    steps_of,
    verify,
)
from hydragraph.train.model import adapted, build_model, captured_loss, check_vocabulary, skeleton
from hydragraph.train.optimizer import learning_rate, optimizer_factory
from hydragraph.train.plan_input import read_costs
from hydragraph.train.reference_scores import ReferenceScores, model_identity
from hydragraph.train.run_folder import Begin, Checkpoint, RunFolder
from hydragraph.train.run_pieces import check_places, keep_pieces, open_pieces
from hydragraph.train.run_recovery import go_on, write_run_ranks
from hydragraph.train.run_saving import (
    checkpoint,
    finish,
    hyperparameters,
    load,
    naming_the_checkpoint,
    saves_after,
    settle_checkpoints,
    stops_after,
    write_spans,
)
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.step_reporting import log_step, open_log, peak_of
from hydragraph.train.straggler_setup import controller_of, follows, policy_of
from hydragraph.train.stragglers.run_events import RunEvent, append_event
from hydragraph.train.train_state import Run, RunOutcome, TrainState, ahead_of
from hydragraph.train.watcher import Watcher

# Request to move state; above all signal numbers.
MOVES = 500
TRACED_STEPS = 12
_PASSED_ON = "max_grad_norm", "backend", "check", "compiled", "trust", "progress_s", "home", "deterministic", "seed"


def train(
    config: TrainConfig,
    begin: Begin,
    compile: Callable[..., Any],
    watcher: Watcher,
    trace: bool = False,
    step: int | None = None,
    stopping: Requests | None = None,
) -> RunOutcome:
    """Run training on all launched ranks.

    Args:
        trace: record instruction times of the first steps, for Perfetto.
        stopping: stop requests; after one on any rank, all ranks save a checkpoint and return.

    Raises:
        ValueError: the config, the data or the folder is invalid.
        OSError: a file cannot be written; the last checkpoint remains valid.
        FloatingPointError: a loss or gradient is not finite; weights are not updated.
    """
    world = join(config.device)
    folder = RunFolder(Path(config.output))
    launched = _Launched(compile, watcher, world, folder, stopping or Stopping(config.grace_s))
    if comes_late():
        return _join_run(config, launched)
    world.watch.progress_s = config.progress_s
    with world.calling("train"), ExitStack() as owned:

        def own() -> tuple[TrainConfig, Checkpoint | None]:
            last = folder.check(config, begin, step)
            if last is not None:
                # Raises ValueError for damaged lines
                read_metrics(folder.metrics)
            as_stored = _with_stored_heldout(config, last)
            owned.enter_context(folder.owned())
            return as_stored, last

        # Only rank 0 locks the folder; all ranks get its config and checkpoint, or error.
        found = together(world, "locking the run's folder", world.rank == 0, own)[0]
        assert found is not None
        _refuse_apart(world, folder)
        return _session(found[0], _Start(begin, step, found[1], trace), launched, owned)


@dataclass(frozen=True)
class _Launched:
    compile: Callable[..., Any]
    watcher: Watcher
    world: World
    folder: RunFolder
    stopping: Requests

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    @property
    def leader(self) -> Watcher | None:
        return self.watcher if self.leads else None


@dataclass(frozen=True)
class _Start:
    begin: Begin
    step: int | None
    last: Checkpoint | None
    trace: bool


def _with_stored_heldout(config: TrainConfig, last: Checkpoint | None) -> TrainConfig:
    if last is None or config.data.heldout is not None:
        return config
    try:
        stored = read_extra(last.path)["user"]["mini_batches"]
    except Exception:
        # `load` reports damage
        return config
    # The default fraction depends on other settings. A continued run keeps its split: held-out
    # documents stay held out.
    heldout = stored.get("members", [stored])[0]["heldout"]
    if not heldout and config.evaluates and not config.data.evaluation:
        raise ValueError(
            f"the run up to {last.path} held out no documents, so it has no texts to evaluate on: set data.evaluation, "
            "or start a new run"
        )
    return config if heldout == config.held_out else replace(config, data=replace(config.data, heldout=heldout))


def _refuse_apart(world: World, folder: RunFolder) -> None:
    mark = together(world, "marking the run's folder", world.rank == 0, lambda: leave_mark(folder.path))[0]
    assert mark is not None
    try:
        together(world, "reading the run's folder", True, lambda: see(mark, f"output {folder.path}", world.rank))
    finally:
        if world.rank == 0:
            mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class _RunInputs:
    """Inputs of a run, on every rank.

    Attributes:
        config: the config, with `epochs` converted to `steps`.
        reference: scores before training, possibly incomplete; None: not needed.
    """

    config: TrainConfig
    tokens: PreparedCorpus
    model: nn.Module
    ranks: int
    launched: _Launched
    strategies: tuple[Strategy, ...]
    reference: ReferenceScores | None
    anew: Callable[[], Mixture]

    @staticmethod
    def of(
        config: TrainConfig, tokens: PreparedCorpus, model: nn.Module, ranks: int, launched: _Launched, joins: bool
    ) -> _RunInputs:
        strategies = () if config.automatic else read_strategies(config.strategies, model, ranks)
        # The steps of `epochs` depend on the documents' lengths.
        config = replace(config, steps=steps_of(config, mini_batches(config, tokens)), epochs=None)
        reference = None
        if config.objective is not None and config.objective.needs_reference:
            evaluation = evaluation_streams(config, tokens) if config.evaluates else {}
            identify = partial(model_identity, config)
            identity = None
            if not joins:
                identity = together(launched.world, "reading the model's files", launched.leads, identify)[0]
            reference = ReferenceScores(launched.folder.reference, mini_batches(config, tokens), evaluation, identity)
        anew = partial(mini_batches, config, tokens, None if reference is None else reference.of)
        return _RunInputs(config, tokens, model, ranks, launched, strategies, reference, anew)

    def evaluation(self) -> dict[str, list[list[Drawn]]]:
        scores = None if self.reference is None else self.reference.of
        return evaluation_batches(self.config, self.tokens, scores) if self.config.evaluates else {}

    def run(self, executor: Any, pieces: Pieces | None, **leading: Any) -> Run:
        config = self.config
        world = self.launched.world
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return Run(
            config,
            world,
            self.launched.folder,
            executor,
            () if config.plan.choose else self.strategies,
            evaluate_at=parts_of_epochs(self.anew(), config.evaluate_per_epoch, config.steps),
            checkpoint_at=parts_of_epochs(self.anew(), config.checkpoint_per_epoch, config.steps),
            pieces=pieces,
            settings=hyperparameters(optimizer_factory(config.optimizer, self.model, world.device)(trained)),
            **leading,
        )


def _session(given: TrainConfig, start: _Start, launched: _Launched, owned: ExitStack) -> RunOutcome:
    world = launched.world
    folder = launched.folder
    leader = launched.leader
    # Check config and data on every host before any rank builds a model.
    ranks = world.ranks if (member := here()) is None else member.ranks  # some ranks may join `world` later
    together(world, "checking the config", world.local_rank == 0, lambda: check_settings(given, ranks))
    together(world, "checking the places for checkpoint pieces", world.local_rank == 0, lambda: check_places(given))
    together(world, "reading the data", world.local_rank == 0, lambda: check_data(given))
    tokens = shared_tokens(given, world, launched.watcher)
    prepared = _RunInputs.of(given, tokens, _model(given, tokens), ranks, launched, joins=False)
    config = prepared.config
    batches = prepared.anew()
    _check_inputs(given, prepared, batches, start)
    if leader is not None:
        unintended = remarks(given, prepared.model, prepared.strategies, ranks, batches, config.steps)
        for sentence in (*data_remarks(config), *length_remarks(config, tokens), *unintended):
            leader.note(sentence)
    # Compile, then load weights unless a checkpoint replaces them.
    executor = _compiled(prepared)
    if prepared.strategies and world.ranks < ranks:
        prepared = replace(prepared, strategies=executor.strategies)
    if config.model.weights is not None and start.last is None:
        executor.load_pretrained(Path(config.model.weights))
    with launched.stopping.working(), ExitStack() as stack:
        changed = folder.changes(config) if leader is not None and start.last is not None else ""
        begin = partial(folder.begin, config, start.begin, start.step)
        last, done = start.last, 0
        # `begin` may delete an earlier run, so check first.
        if last is None:
            together(world, "creating the run's folder", world.rank == 0, begin)
        if stop := _score(prepared, executor, start):
            executor.close()
            return RunOutcome(folder, (), stop)
        evaluation = prepared.evaluation()
        # Continue from the last checkpoint, or an earlier one if it is damaged.
        if last is not None:
            last, done = _load(prepared, executor, batches, last, start.step is None)
            together(world, "continuing in the run's folder", world.rank == 0, begin)
        pieces = open_pieces(config, world, folder)
        if leader is not None:
            tokenizer.copy(tokens.directory, folder.tokenizer)
            if last is not None:
                _note_resumed(prepared, leader, done, last, changed)
        stack.enter_context(naming_the_checkpoint(folder))
        log = stack.enter_context(open_log(folder, done, leader)) if leader is not None else None
        executor.watched = config.watches
        # A single rank owns all state and cannot change plans
        alone = world.ranks == 1
        watches = config.elastic.monitor or (not alone and (config.replans or follows(config, executor)))
        controller = controller_of(config, world, executor) if watches and leader is not None else None
        if controller is not None:
            stack.callback(controller.close)
        callbacks = Callbacks.load(config.callbacks if leader is not None else ())
        run = prepared.run(
            executor,
            pieces,
            evaluation=evaluation,
            watcher=leader,
            log=log,
            controller=controller,
            peak_flops_per_s=peak_of(config, world),
            callbacks=callbacks,
            watched=() if member is None else member.generation.members,
        )
        if leader is not None:
            stack.enter_context(callbacks.started(config))
            for sentence in (*executor.planning.explanation, *filter(None, [executor.decision])):
                leader.note(sentence)
            leader.started(done, config.steps)
        # positions: step -> position in the data after it.
        positions: dict[int, Mapping[str, Any]] = {done: dict(batches.state_dict())}
        saved = 0 if last is None else last.step
        coming = ahead_of(run, batches)
        owns = leader is not None
        state = TrainState(launched.watcher, batches, prepared.anew, coming, done, saved, positions, owns=owns)
        state.kept = last is not None
        state.began = folder.began
        executor.spans = list[TraceEvent]() if start.trace else None
        write_run_ranks(run)
        return _follow(run, state, owned, prepared)


def _check_inputs(given: TrainConfig, prepared: _RunInputs, batches: Mixture, start: _Start) -> None:
    config = prepared.config
    if start.last is not None and start.last.step > config.steps:
        raise ValueError(f"{start.last.path} is past the last step, {config.steps}: raise 'epochs'")
    check_budget(given, batches.tokens)
    if config.evaluates:
        # Raise these errors before training starts
        evaluation_streams(config, prepared.tokens)


def _score(prepared: _RunInputs, executor: Any, start: _Start) -> int:
    launched = prepared.launched
    world = launched.world
    # missing[i]: answers of a mini-batch that no earlier session has scored.
    reference, weights = prepared.reference, prepared.config.model.weights
    missing: list[list[tuple[str, int]]] = [] if reference is None else reference.missing(prepared.config)
    if reference is None or not missing:
        return 0
    if start.last is not None:
        checked = partial(_check_checkpoint, start.last.path, prepared, executor)
        together(world, "checking the checkpoint", launched.leads, checked)
        if weights is not None:
            executor.load_pretrained(Path(weights))
    return reference.complete(missing, executor, world, launched.stopping, launched.leader)


def _check_checkpoint(path: Path, prepared: _RunInputs, executor: Any) -> None:
    try:
        manifest, extra = read_manifest(path), read_extra(path)
    except Exception:
        # `load` reports damage
        return
    shapes = {name: parameter.shape for name, parameter in executor.program.parameters.items()}
    check_model(f"checkpoint {path}", manifest.parameters, manifest.optimizer, shapes, kind_of(executor.optimizer))
    _place(prepared.anew(), extra["user"]["mini_batches"], prepared, owns=True)


def _place(batches: Mixture, state: Mapping[str, Any], prepared: _RunInputs, owns: bool) -> None:
    """Restore the position in the data. If the data has changed, delete its token files and raise ValueError.

    Args:
        owns: whether this rank prepares its host's data.
    """
    try:
        batches.load_state_dict(state)
    except ValueError:
        changed = any(file.fingerprint not in json.dumps(state) for file in prepared.tokens.files)
        if owns and changed and prepared.config.data.cache is None:
            shutil.rmtree(prepared.tokens.directory, ignore_errors=True)
        raise


def _load(
    prepared: _RunInputs, executor: Any, batches: Mixture, last: Checkpoint, newest: bool
) -> tuple[Checkpoint, int]:
    launched = prepared.launched
    world = launched.world
    steps = prepared.config.steps
    pieces = open_pieces(prepared.config, world, launched.folder) if newest else None
    last, extra = load(world, launched.folder, executor, last, newest, launched.leader, pieces)
    _place(batches, extra["mini_batches"], prepared, owns=not world.local_rank)
    done: int = extra.get("step", last.step)
    if done > steps:
        raise ValueError(f"checkpoint pieces are from step {done}, past the last step: set 'steps' to {done} or more")
    return last, done


def _note_resumed(prepared: _RunInputs, leader: Watcher, done: int, last: Checkpoint, changed: str) -> None:
    launched = prepared.launched
    since = f"; changed settings: {changed}" if changed else ""
    source = "checkpoint pieces" if done > last.step else last.path
    sentence = f"continuing after step {done} of {prepared.config.steps}, from {source}{since}"
    event = RunEvent(done, "resumed", tuple(range(launched.world.ranks)), 0.0, sentence)
    append_event(launched.folder.events, event)
    leader.note(sentence)


def _compiled(prepared: _RunInputs, **joining: bool) -> Any:
    config = prepared.config
    device = prepared.launched.world.device
    return prepared.launched.compile(
        prepared.model,
        optimizer=optimizer_factory(config.optimizer, prepared.model, device),
        **_chosen_from(prepared),
        **captured_loss(config),
        **{name: getattr(config, name) for name in _PASSED_ON},
        dtype=getattr(torch, config.dtype),
        push_dtype=getattr(torch, config.push_dtype),
        device=device,
        **joining,
    )


def _join_run(config: TrainConfig, launched: _Launched) -> RunOutcome:
    tokens = open_tokens(config, kept("data", "data", lambda: prepare(config)))
    if config.adapter is None:
        model = skeleton(config.model, tokens.vocabulary, tokens.end_of_text)
    else:
        model = _model(config, tokens)
    prepared = _RunInputs.of(config, tokens, model, config.ranks, launched, joins=True)
    batches = prepared.anew()
    executor = _compiled(prepared, joining=True)
    executor.watched = config.watches
    run = prepared.run(executor, None, evaluation={})
    state = TrainState(launched.watcher, batches, prepared.anew, ahead_of(run, batches), -1, -1, {})
    run = replace(run, joined=cache(partial(_joined, run, state, prepared, config)))
    with ExitStack() as owned, launched.stopping.working(), naming_the_checkpoint(launched.folder):
        return _follow(run, state, owned, prepared)


def _joined(run: Run, state: TrainState, prepared: _RunInputs, given: TrainConfig) -> Run:
    """Return a joining rank's run; ranks must meet first, because rank 0 may change the folder."""
    config = _with_stored_heldout(given, run.folder.last())
    if config is not given:
        inputs = (prepared.tokens, prepared.model, prepared.ranks, prepared.launched)
        prepared = _RunInputs.of(config, *inputs, joins=True)
        run = replace(prepared.run(run.executor, None, evaluation={}), world=run.world)
    if prepared.reference is not None:
        prepared.reference.read()
    state.anew, state.batches = prepared.anew, prepared.anew()
    pieces = open_pieces(config, apart(config.device), run.folder)
    return replace(run, evaluation=prepared.evaluation(), pieces=pieces)


def _follow(run: Run, state: TrainState, owned: ExitStack, prepared: _RunInputs) -> RunOutcome:
    failure: RankFailure | Stopped | None = None
    # Each round trains with fixed members. A lost, joining or leaving rank ends it with an
    # exception, and `go_on` prepares the next round.
    changed = state.done < 0
    while True:
        try:
            ending = ""
            if changed:
                run, ending = go_on(run, state, failure, owned)
                changed = False
            with run.world.calling("train"):
                if ending:
                    return _end_early(run, state, ending)
                if (elastic() or run.pieces is not None) and not state.done and not state.kept:
                    # A rank may be lost before the first scheduled checkpoint
                    checkpoint(run, state)
                stopped = _steps(run, state, prepared.launched.stopping)
                if run.executor.spans is not None:
                    write_spans(run)
                if run.config.checkpoint.asynchronous:
                    settle_checkpoints(run)
                if not stopped:
                    finish(run, prepared.model, prepared.tokens, state.done)
                if elastic() or run.pieces is not None:
                    # If a rank fails before this call, all ranks recover together
                    run.world.gather(None)
            break
        except (RankFailure, Stopped) as error:
            if not elastic():
                raise
            failure, changed = error, True
    run.executor.close()
    if run.pieces is not None and not stopped:
        run.pieces.clear(store=run.world.rank == 0)
    return run.outcome(stopped)


def _steps(run: Run, state: TrainState, stopping: Requests) -> int:
    config = run.config
    executor = run.executor
    # All ranks agree on `signal` in each step, so they stop together.
    executor.listens = lambda: stopping.signal
    first = state.done + 1
    for step in range(first, config.steps + 1):
        if stops_after(run, state.done):
            _stop_early(run, state)
            break
        if executor.spans is not None and step == first + TRACED_STEPS:
            write_spans(run)
        sequences = state.coming.take(config.steps + 1 - step)
        try:
            # A step that requests a move is not trained until the move begins.
            while not _trained(run, state, step, sequences, stopping.signal):
                _rehome(run)
        except Stopped as request:
            if request.reason >= CALLED:
                raise
            # The interrupted step is not trained; the state is the previous step's.
            if state.saved < step - 1:
                checkpoint(run, state)
            return request.reason
        if saves_after(run, step):
            checkpoint(run, state)
        if run.keeps(step):
            keep_pieces(run, state)
    return 0


def _stop_early(run: Run, state: TrainState) -> None:
    if state.saved < state.done:
        checkpoint(run, state)
    if run.watcher is not None and run.log is not None:
        best = lowest(run.log.history)
        least = f" by more than {run.config.min_improvement:g}" if run.config.min_improvement else ""
        run.watcher.note(
            f"ending after step {state.done} of {run.config.steps}: the evaluation loss has not fallen{least} in "
            f"{run.config.patience} evaluations (patience); the lowest loss was after step {best}"
        )


def _trained(run: Run, state: TrainState, step: int, sequences: list[Drawn], signal: int) -> bool:
    following = run.controller.following if run.controller is not None else None
    # Only the leading rank knows of a move; the agreement on stop requests tells the others.
    moves = following is not None and following.next is not None
    run.executor.stopping = MOVES if moves else signal
    try:
        _train_step(run, state, step, sequences)
    except Stopped as request:
        if request.reason != MOVES:
            raise
        return False
    return True


def _rehome(run: Run) -> None:
    """Start moving state to new owners; all ranks must call this."""
    following = run.controller.following if run.controller is not None else None
    home = run.world.gather(None if following is None else following.next)[0]
    run.executor.stopping = 0
    if home is None:
        return
    run.executor.rehome(home)
    if following is not None:
        following.begun()


def _train_step(run: Run, state: TrainState, step: int, sequences: list[Drawn]) -> None:
    config = run.config
    strategy = run.strategy_of(step)
    following = state.coming.following
    # A promise lets ranks agree on the next step during this one. No other meeting of the ranks may
    # come between the two steps.
    if following is not None and run.pairs is None and not _meets_after(run, step):
        run.executor.promise(following, run.strategy_of(step + 1))
    lr = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
    assert run.executor.optimizer is not None, "a training run has an optimizer"
    for group in run.executor.optimizer.param_groups:
        group["lr"] = lr
    try:
        steps: Any = run.pairs or run.executor
        report: StepReport = steps.step(sequences, strategy)
    except FloatingPointError as error:
        if state.saved < state.done:
            checkpoint(run, state)
        if config.checkpoint.asynchronous:
            # Wait, so that the error names the newest checkpoint
            run.executor.wait_saved()
        # The last checkpoint may be from a run that already diverges
        earlier = [place.step for place in run.folder.all()][-2:-1]
        other = f", or from an earlier one with --resume-from step-{earlier[0]}" if earlier else ""
        raise FloatingPointError(f"step {step}: {error}; {run.folder.how_to_go_on}{other}") from None
    state.last = (step, report)
    state.done = step
    state.positions[step] = dict(state.coming.position)
    # Ranks may return to a checkpoint only in an elastic run.
    if not elastic():
        state.positions = {step: state.positions[step]}
    if run.executor.spans is not None:
        seconds = report.seconds - report.planning_s
        run.traced.append(TracedStep(report.step, report.strategy, report.assignment, seconds))
    log_step(run, step, report)


def _meets_after(run: Run, step: int) -> bool:
    moves = run.controller is not None and run.controller.following is not None and run.controller.following.moving
    return moves or run.saves(step) or run.keeps(step) or run.evaluates(step)


def _end_early(run: Run, state: TrainState, ending: str) -> RunOutcome:
    if state.saved < state.done:
        checkpoint(run, state)
    if run.config.checkpoint.asynchronous:
        settle_checkpoints(run)
    run.executor.close()
    if ending != ALL_LEAVE:
        saved = f"step {state.done} is saved in {run.folder.place(state.done)}"
        raise TooFewRanks(ending, f"{saved}; continue with --resume and more ranks")
    return run.outcome(signal.SIGTERM)


def _chosen_from(prepared: _RunInputs) -> dict[str, Any]:
    config, strategies = prepared.config, prepared.strategies
    if not config.plan.choose:
        return {"strategy": strategies if len(strategies) > 1 else strategies[0]}
    batches = mini_batches(config, prepared.tokens)
    return {
        "strategy": "auto" if config.automatic else strategies,
        "profile": read_costs(config.plan, prepared.ranks),
        "lengths": [list(batches.skip()) for _ in range(config.plan.sample)],
        "policy": policy_of(config),
    }


def _model(config: TrainConfig, tokens: PreparedCorpus) -> nn.Module:
    sizes = (tokens.vocabulary, tokens.end_of_text)
    if config.model.weights is None:
        return adapted(build_model(config.model, *sizes, config.seed), config.adapter, config.seed)
    model = skeleton(config.model, *sizes)
    check_vocabulary(config.model, model, tokens.vocabulary)
    return model


def shared_tokens(config: TrainConfig, world: World, watcher: Watcher) -> PreparedCorpus:
    """Prepare the corpus once per host; raise ValueError if hosts read different corpora."""
    watched = watcher.preparing
    reads = world.local_rank == 0
    together(world, "preparing the data", reads, lambda: verify(config, prepare(config, watched), watched))
    tokens = open_tokens(config, prepare(config))
    # The files may change before a rank joins
    if reads:
        keep(tokens.directory, "data", "data")
    # Hosts prepare files separately, so corpora may differ.
    fingerprints = world.gather(tokens.fingerprint)
    if len(set(fingerprints)) > 1:
        different = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
        raise ValueError(f"data: rank {different} and rank 0 read different corpora: give every host the same files")
    return tokens

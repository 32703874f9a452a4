"""Loading and saving of checkpoints, the trace and the final model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hydragraph.checkpoint.folder import complete, prune
from hydragraph.checkpoint.manifest import Damaged
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.launch import World
from hydragraph.cluster.shared_outcome import together
from hydragraph.cost.trace_file import write_events
from hydragraph.engine.executable import Executable
from hydragraph.train.best_evaluation import lowest, without_improvement
from hydragraph.train.data import PreparedCorpus
from hydragraph.train.huggingface_export import export, write_model
from hydragraph.train.loss_picture import matplotlib_installed, write_picture
from hydragraph.train.run_folder import Checkpoint, RunFolder
from hydragraph.train.stragglers.run_events import RunEvent, append_event, read_events
from hydragraph.train.train_state import Run, TrainState
from hydragraph.train.watcher import Watcher


def load(
    world: World,
    folder: RunFolder,
    executor: Executable,
    last: Checkpoint,
    fall_back: bool,
    leader: Watcher | None,
    pieces: Pieces | None,
) -> tuple[Checkpoint, dict[str, Any]]:
    """Load a checkpoint, or an earlier one if it is damaged; return the loaded one and its extra data.

    Args:
        leader: watcher that reports damaged checkpoints, on rank 0 only.
        pieces: checkpoint pieces, loaded if newer than the checkpoint; their extra data contains `step`.
    """
    while True:
        try:
            assert executor.optimizer is not None, "a training run has an optimizer"
            settings = hyperparameters(executor.optimizer)
            extra = executor.load(last.path if pieces is None else (pieces, last.path))
            # Keep the config's hyperparameters, not the checkpoint's
            set_hyperparameters(executor, settings)
            return last, extra
        except ValueError as error:
            # The error may be Damaged on only some ranks
            # All ranks try the earlier checkpoint if any rank finds this one damaged.
            if not any(world.gather(isinstance(error, Damaged))) or not fall_back:
                raise
            reason = error
        aside = partial(folder.replace_damaged, last)
        earlier = together(world, "setting a checkpoint aside", world.rank == 0, aside)[0]
        if earlier is None:
            raise reason
        last = earlier
        if leader is not None:
            leader.note(f"a DAMAGED checkpoint was renamed: {reason}; trying {last.path}")


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]


def set_hyperparameters(executor: Executable, settings: Sequence[Mapping[str, Any]]) -> None:
    assert executor.optimizer is not None, "a training run has an optimizer"
    for group, own in zip(executor.optimizer.param_groups, settings, strict=True):
        group.update(own)


@contextmanager
def naming_the_checkpoint(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        where = "" if error.errno is None or error.filename is not None else f": '{folder.path}'"
        raise OSError(f"{error}{where}; {folder.how_to_go_on}") from error


def checkpoint(run: Run, state: TrainState) -> None:
    began = time.monotonic()
    step = state.done
    place = run.folder.place(step)
    extra = {"mini_batches": dict(state.positions[step])}
    if run.config.checkpoint.asynchronous:
        settle_checkpoints(run)
        run.executor.save(place, extra, asynchronous=True)
        run.saving.append((step, place))
    else:
        run.executor.save(place, extra)
        run.callbacks.call("on_checkpoint", step, place)
        _prune(run)
    # Keep positions since the previous checkpoint, to which ranks return if this one is damaged.
    before, state.saved = state.saved, step
    state.kept = True
    state.positions = {number: at for number, at in state.positions.items() if number >= before}
    if run.log is not None:
        why = f"in {place}" + (", during training" if run.config.checkpoint.asynchronous else "")
        everybody = tuple(range(run.world.ranks))
        append_event(run.folder.events, RunEvent(step, "saved", everybody, time.monotonic() - began, why))
    if run.log is not None and run.log.history and matplotlib_installed():
        write_picture(run.log.history, run.folder.picture, read_events(run.folder.events))


def settle_checkpoints(run: Run) -> None:
    run.executor.wait_saved()
    while run.saving:
        run.callbacks.call("on_checkpoint", *run.saving.pop())
    _prune(run)


def forget_unsaved(run: Run) -> None:
    """Forget incomplete checkpoints, for which callbacks must not run."""
    whole = {place for _, place in complete(run.folder.checkpoints)}
    run.saving[:] = [(step, place) for step, place in run.saving if place in whole]


def _prune(run: Run) -> None:
    if run.log is not None:
        prune(run.folder.checkpoints, run.config.keep, _best_saved(run) if run.config.keep_best else None)


def _best_saved(run: Run) -> int | None:
    assert run.log is not None
    return lowest(run.log.history, among=[step for step, _ in complete(run.folder.checkpoints)])


def saves_after(run: Run, step: int) -> bool:
    """Return whether a checkpoint is due after a step; all ranks must call this."""
    if run.saves(step):
        return True
    if not (run.config.keep_best and run.evaluates(step)):
        return False
    # With `keep_best`, rank 0 saves only a loss below those of all kept checkpoints.
    among = [step, *(saved for saved, _ in (*complete(run.folder.checkpoints), *run.saving))]
    best = run.log is not None and lowest(run.log.history, among) == step
    return bool(run.world.gather(best)[0])


def stops_after(run: Run, step: int) -> bool:
    """Return whether `patience` ends the run; all ranks must call this."""
    config = run.config
    if config.patience is None or not run.evaluates(step):
        return False
    count = 0 if run.log is None else without_improvement(run.log.history, config.min_improvement)
    return bool(run.world.gather(count)[0] >= config.patience)


def write_spans(run: Run) -> None:
    per_rank = run.world.gather(run.executor.spans or [])
    run.executor.spans = None
    if run.watcher is not None:
        write_events(per_rank, run.folder.trace, run.traced)
        run.watcher.note(
            f"{run.folder.trace} has the times of all instructions: open it at https://ui.perfetto.dev, or run "
            "hydragraph compare to compare it with the cost model"
        )


def finish(run: Run, model: nn.Module, tokens: PreparedCorpus, done: int) -> None:
    best = None
    if run.config.keep_best:
        best = run.world.gather(None if run.log is None else _best_saved(run))[0]
    if best is None or best == done:
        state = run.executor.full_state_dict()
        if run.log is not None:
            export(model, state, tokens.directory, run.folder.model)
        return
    if run.watcher is not None:
        write_model(run.folder, run.folder.place(best), run.folder.model)
        run.watcher.note(f"{run.folder.model} is the model after step {best}, which has the lowest evaluation loss")

"""Evaluations, metrics and events after each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from hydragraph.cluster.launch import World
from hydragraph.data.mini_batches import Drawn
from hydragraph.engine.step_report import StepReport
from hydragraph.errors import Stopped
from hydragraph.spec.strategy import Strategy
from hydragraph.train.config import TrainConfig
from hydragraph.train.loss_picture import matplotlib_installed
from hydragraph.train.model_flops import peak_flops_per_s, step_flops
from hydragraph.train.optimizer import learning_rate
from hydragraph.train.paired_steps import PairReport
from hydragraph.train.preference_objective import mean_over_pairs
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import Metrics, MetricsLog, peak_memory, tensorboard_installed
from hydragraph.train.straggler_file import write_slow
from hydragraph.train.stragglers.run_events import RunEvent, append_event, now
from hydragraph.train.train_state import Run
from hydragraph.train.watcher import Watcher

_REPORTED = (
    *("loss", "grad_norm", "tokens", "strategy", "sequences", "micro_batches", "padding"),
    *("planning_s", "planning_hidden_s", "expected_s"),
)


def log_step(run: Run, step: int, report: StepReport) -> None:
    config = run.config
    losses: dict[str, float] = {}
    eval_pairs: dict[str, dict[str, float]] = {}
    # All ranks evaluate. After a stop request, the step is logged without evaluation losses.
    with suppress(Stopped):
        if run.evaluates(step):
            losses, eval_pairs = _evaluate(run, step)
    if run.log is None or run.watcher is None:
        return
    comparison = run.expectation.stepped(report.strategy, report.expected_s, report.seconds - report.preparing_s)
    pairs = report.pairs if isinstance(report, PairReport) else {}
    seconds = report.seconds + pairs.get("scoring_s", 0.0)
    metrics = Metrics(
        step=step,
        lr=learning_rate(step, config.steps, config.optimizer.lr, config.schedule),
        tokens_per_s=sum(report.assignment.lengths) / seconds,
        seconds=seconds,
        eval_loss=losses.get("heldout", next(iter(losses.values()), None)),
        eval_data=run.eval_data if losses else "",
        eval_losses=losses,
        exposed_pull_s=report.exposed.pull,
        exposed_push_s=report.exposed.push,
        exposed_p2p_s=report.exposed.p2p,
        **{name: getattr(report, name) for name in _REPORTED},
        peak_memory_bytes=peak_memory(run.world.device),
        mfu=_mfu(run, report, seconds),
        pairs=pairs,
        eval_pairs=eval_pairs,
        time=now(),
        plan=() if run.log.written else run.executor.planning.explanation,
        comparison="" if comparison is None else str(comparison),
        smoothed=config.label_smoothing > 0,
    )
    run.log.write(metrics)
    run.watcher.stepped(metrics)
    run.callbacks.call("on_step", metrics)
    if losses:
        run.callbacks.call("on_evaluate", metrics)
    if comparison is not None:
        again = comparison.matters and run.controller is not None and run.controller.correct()
        run.watcher.note(f"step {step}: {comparison}{'; planning again with measured times' if again else ''}")
    if run.controller is None:
        return
    # With the file of slow ranks, another rank can lead if this one is lost.
    before = run.controller.slow if run.watched else {}
    for event in run.controller.stepped(report):
        tell(run, event)
        if event.event == "switch" and event.done:
            run.expectation.restart()
    slow = run.controller.slow if run.watched else {}
    if slow != before:
        write_slow(run.folder, {run.watched[rank]: straggler for rank, straggler in slow.items()})


def _evaluate(run: Run, step: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    losses: dict[str, float] = {}
    figures: dict[str, dict[str, float]] = {}
    for name, batches in run.evaluation.items():
        pairs: dict[str, float] = {}
        try:
            losses[name], pairs = _evaluate_set(run, run.strategy_of(step), batches)
        except FloatingPointError:
            losses[name] = math.nan
            if run.watcher is not None:
                run.watcher.note(f"step {step}: the loss on {name} is not finite; training continues")
        if pairs:
            figures[name] = pairs
    return losses, figures


def _evaluate_set(
    run: Run, strategy: Strategy | None, batches: Sequence[list[Drawn]]
) -> tuple[float, dict[str, float]]:
    if run.pairs is not None:
        results = [run.pairs.evaluate(sequences, strategy) for sequences in batches]
        names = results[0].figures
        figures = {n: mean_over_pairs(results, [r.figures[n] for r in results]) for n in names}
        return mean_over_pairs(results, [result.loss for result in results]), figures
    reports: list[StepReport] = [run.executor.evaluate(sequences, strategy) for sequences in batches]
    return sum(r.loss * r.tokens for r in reports) / sum(r.tokens for r in reports), {}


def tell(run: Run, event: RunEvent) -> None:
    append_event(run.folder.events, event)
    if run.log is not None:
        run.log.mark(event)
    if run.watcher is not None:
        run.watcher.note(str(event))


def peak_of(config: TrainConfig, world: World) -> float | None:
    """Return the peak FLOP/s of all GPUs together; None: unknown."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peaks = world.gather(peak_flops_per_s(name, getattr(torch, config.dtype)))
    # A sum without some ranks would overstate MFU.
    known_peaks = [peak for peak in peaks if peak is not None]
    return sum(known_peaks) if len(known_peaks) == len(peaks) else None


def _mfu(run: Run, report: StepReport, seconds: float) -> float | None:
    if run.peak_flops_per_s is None:
        return None
    lengths = [n for n in report.assignment.lengths if n]
    flops = step_flops(run.executor.program, lengths, scored=run.pairs is not None)
    return flops / seconds / run.peak_flops_per_s


def open_log(folder: RunFolder, done: int, watcher: Watcher) -> MetricsLog:
    remedy = "pip install 'hydragraph[train]'"
    if not matplotlib_installed():
        watcher.note(f"no picture of the loss, because matplotlib is not installed ({remedy})")
    if not tensorboard_installed():
        watcher.note(f"no TensorBoard events, because tensorboard is not installed ({remedy})")
    return MetricsLog(folder.metrics, folder.tensorboard if tensorboard_installed() else None, done)

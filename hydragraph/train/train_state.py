"""A run as values: what stays the same during it (`Run`), how far it is (`Course`), how it ended (`RunOutcome`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydragraph.cluster.launch import World
from hydragraph.cost.trace_file import TracedStep
from hydragraph.data.mini_batches import Drawn, MiniBatches
from hydragraph.data.mixture import Mixture
from hydragraph.engine.recovery import Survived
from hydragraph.spec.strategy import Strategy
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.config import TrainConfig
from hydragraph.train.mini_batch_lookahead import Ahead
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import Metrics, MetricsLog
from hydragraph.train.stragglers.controller import Controller
from hydragraph.train.trainable import StepResult, Trainable, Watcher


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
class Run:
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

    def strategy_of(self, step: int) -> Strategy | None:
        """Return the strategy whose turn it is in a step; None: the executor chooses."""
        return self.strategies[(step - 1) % len(self.strategies)] if self.strategies else None


@dataclass
class Course:
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
        callbacks: of a rank that came to lead, begun; None: it never has.
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
    callbacks: Callbacks | None = None


def ahead_of(run: Run, batches: MiniBatches | Mixture) -> Ahead:
    """Read mini-batches as far ahead as they are planned."""
    plan = run.config.plan
    return Ahead(batches, plan.ahead if plan.choose else 0, run.executor.announce)


def due(step: int, every: int, steps: int) -> bool:
    """Say whether something that happens every so many steps (0: at the end only) is due."""
    return step == steps or (every > 0 and step % every == 0)

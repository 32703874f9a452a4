"""Constants, progress and outcome of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.launch import World
from hydragraph.cost.trace_file import TracedStep
from hydragraph.data.mini_batches import Drawn, Mixture
from hydragraph.engine.executable import Executable
from hydragraph.engine.recovery import Survived
from hydragraph.engine.step_report import StepReport
from hydragraph.spec.strategy import Strategy
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.config import TrainConfig
from hydragraph.train.mini_batch_lookahead import MiniBatchLookahead
from hydragraph.train.paired_steps import PairedSteps
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import Metrics, MetricsLog
from hydragraph.train.stragglers.controller import Controller
from hydragraph.train.stragglers.expected_seconds import ExpectedTimes
from hydragraph.train.watcher import Watcher


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run.

    Attributes:
        history: metrics of all sessions, on rank 0.
        stopped: signal that ended the run early, or 0.
    """

    folder: RunFolder
    history: tuple[Metrics, ...] = ()
    stopped: int = 0


@dataclass(frozen=True, eq=False)
class Run:
    config: TrainConfig
    world: World
    folder: RunFolder
    executor: Executable
    # Used in turn; empty if the executor chooses
    strategies: tuple[Strategy, ...]
    evaluation: Mapping[str, list[list[Drawn]]]
    # None except on rank 0
    watcher: Watcher | None = None
    log: MetricsLog | None = None
    controller: Controller | None = None
    peak_flops_per_s: float | None = None
    # Empty except on rank 0
    callbacks: Callbacks = field(default_factory=Callbacks)
    saving: list[tuple[int, Path]] = field(default_factory=list)
    traced: list[TracedStep] = field(default_factory=list)
    # For this session, on rank 0 only
    expectation: ExpectedTimes = field(default_factory=ExpectedTimes)
    # Member number (`cluster.rendezvous`) of each rank
    watched: tuple[int, ...] = ()
    # Steps of `config.evaluate_per_epoch`
    evaluate_at: frozenset[int] = frozenset()
    # Steps of `config.checkpoint_per_epoch`
    checkpoint_at: frozenset[int] = frozenset()
    pieces: Pieces | None = None
    # Hyperparameters by group
    settings: Sequence[Mapping[str, Any]] = ()
    # On joining ranks; returns the complete `Run` after ranks meet
    joined: Callable[[], Run] | None = None

    @property
    def pairs(self) -> PairedSteps | None:
        objective = self.config.objective
        return None if objective is None else PairedSteps(self.executor, objective.loss)

    @cached_property
    def eval_data(self) -> str:
        """Digest of the data and settings that determine `Metrics.eval_loss`."""
        digest = hashlib.sha256(repr((self.config.objective, self.config.label_smoothing)).encode())
        for sequence in chain.from_iterable(next(iter(self.evaluation.values()))):
            for tensor in sequence.values() if isinstance(sequence, dict) else (sequence,):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]

    def outcome(self, stopped: int) -> RunOutcome:
        return RunOutcome(self.folder, tuple(self.log.history) if self.log is not None else (), stopped)

    def strategy_of(self, step: int) -> Strategy | None:
        # Steps count from 1.
        return self.strategies[(step - 1) % len(self.strategies)] if self.strategies else None

    def evaluates(self, step: int) -> bool:
        config = self.config
        return config.evaluates and (_due(step, config.evaluate_every, config.steps) or step in self.evaluate_at)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is due, even without `keep_best`."""
        return _due(step, self.config.checkpoint_every, self.config.steps) or step in self.checkpoint_at

    def keeps(self, step: int) -> bool:
        return self.pieces is not None and step < self.config.steps and step % self.config.checkpoint.every == 0


@dataclass
class TrainState:
    """Progress of a run, on every rank.

    Attributes:
        kept: whether a checkpoint exists, including step 0's.
        positions: state of `batches` after each step since the second-to-last checkpoint.
        untold: unreported recoveries, with the number of ranks before each.
        began: the run's start time; None: this rank has not joined.
        pieces_fail: whether the last checkpoint in pieces is incomplete.
    """

    watcher: Watcher
    batches: Mixture
    anew: Callable[[], Mixture]
    coming: MiniBatchLookahead
    done: int
    saved: int
    positions: dict[int, Mapping[str, Any]]
    last: tuple[int, StepReport] | None = None
    owns: bool = False
    kept: bool = False
    untold: list[tuple[Survived, int]] = field(default_factory=list)
    began: float | None = None
    callbacks: Callbacks | None = None
    pieces_fail: bool = False


def ahead_of(run: Run, batches: Mixture) -> MiniBatchLookahead:
    plan = run.config.plan
    return MiniBatchLookahead(batches, plan.ahead if plan.choose else 0, (run.pairs or run.executor).announce)


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)

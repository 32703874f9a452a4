"""What the training loop needs of a compiled model, and whom it tells; tests stand in with no more than this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.data.mini_batches import Drawn
from hydragraph.engine.candidate_strategies import Planning
from hydragraph.ir.program import Program
from hydragraph.planner.request import PlanRequest
from hydragraph.runtime.instruction_trace import Exposed, RankTimes, Span
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from hydragraph.train.step_metrics import Metrics


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
    listens: Callable[[], int] | None
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

    def promise(self, sequences: Sequence[Drawn], strategy: Strategy | None = None) -> None:
        """Promise that a step with this comes behind the next one, which no other call parts from it."""

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

"""Protocols of the training loop: the compiled model and the watcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from hydragraph.checkpoint.state_pieces import Pieces
    from hydragraph.cluster.launch import World
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.cost.trace_file import TraceEvent
    from hydragraph.data.mini_batches import Drawn
    from hydragraph.engine.candidate_strategies import Planning
    from hydragraph.engine.state_transfer import Restore
    from hydragraph.ir.program import Program
    from hydragraph.planner.request import PlanRequest
    from hydragraph.runtime.instruction_trace import Exposed, RankTimes
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.home import Home
    from hydragraph.spec.strategy import Strategy
    from hydragraph.train.step_metrics import Metrics


class StepResult(Protocol):
    """Report of a `Trainable` step, equal on every rank."""

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
    """A compiled model, as the training loop needs it."""

    optimizer: torch.optim.Optimizer
    spans: list[TraceEvent] | None
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
        """Choose from other strategies from the next step on, or once all ranks are ready; called on rank 0."""

    def rehome(self, home: Home) -> None:
        """Move state to another home during the next step; all ranks call it."""

    def announce(self, sequences: Sequence[Mapping[str, Any] | Tensor]) -> None:
        """Announce the mini-batch of a later step."""

    def promise(self, sequences: Sequence[Drawn], strategy: Strategy | None = None) -> None:
        """Promise that a step with this mini-batch follows the next one, without another call in between."""

    def step(
        self,
        sequences: Sequence[Mapping[str, Any] | Tensor],
        strategy: Strategy | None = None,
        divide_by: Any = "targets",
    ) -> Any:
        """Train on one global mini-batch; return a `StepResult`, or raise `Stopped` if any rank has `stopping`."""

    def score(
        self, sequences: Sequence[Drawn], entropy: Literal[False] = False, strategy: Strategy | None = None
    ) -> Tensor:
        """Return the log-probability of each sequence's targets, fp32 [L]."""

    def evaluate(self, sequences: Sequence[Drawn], strategy: Strategy | None = None) -> Any:
        """Return a `StepResult` without updating anything."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model on rank 0."""

    def save(self, path: Path, extra: dict[str, Any] | None = None, asynchronous: bool = False) -> None:
        """Write weights, optimizer state and `extra` atomically; if asynchronous, during training."""

    def wait_saved(self) -> None:
        """Wait for the pending checkpoint."""

    def keep(self, pieces: Pieces, extra: dict[str, Any] | None = None) -> tuple[str, ...]:
        """Keep weights, optimizer state and `extra` in pieces; return errors of writing earlier ones."""

    def load(self, path: Restore) -> dict[str, Any]:
        """Load weights and optimizer state, and return `extra`."""

    def load_pretrained(self, path: Path) -> None:
        """Read the weights of a Hugging Face directory, each rank its own part."""

    @property
    def world(self) -> World:
        """Place of this process among the ranks."""

    def close(self) -> None:
        """Close the communication between ranks."""


class Watcher(Protocol):
    """Receives the progress of a run, on rank 0."""

    def preparing(self, what: str, documents: int, part: float) -> None:
        """Report the number of finished documents and their fraction (0: unknown)."""

    def started(self, done: int, steps: int) -> None:
        """Report that training starts after `done` of `steps` steps."""

    def stepped(self, metrics: Metrics) -> None:
        """Report a finished step."""

    def note(self, sentence: str) -> None:
        """Report something a user should know."""

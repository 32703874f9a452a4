"""Report that a step returns."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.runtime.instruction_trace import ExposedSeconds, RankTimes, mean_exposed
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step; identical on every rank except `seconds`, `planning_s` and `preparing_s`.

    Attributes:
        step: step number, from 1.
        loss: sum of the global mini-batch's losses / `divide_by`; by default the mean per target.
        tokens: number of target tokens.
        grad_norm: gradient norm before clipping; 0 for an evaluation.
        strategy: strategy's text.
        chosen: strategy as an object.
        micro_batches: each pipeline's number of micro-batches.
        seconds: wall time on this rank.
        padding: tokens added for sequence parallelism.
        planning_s: seconds of waiting for planning.
        planning_hidden_s: seconds of planning that overlapped with training.
        preparing_s: seconds spent compiling new graphs and building programs.
        expected_s: predicted step time, or 0 without a profile.
        ranks: each rank's time and waits for communication.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    strategy: str
    chosen: Strategy
    sequences: int
    micro_batches: tuple[int, ...]
    seconds: float
    padding: int
    planning_s: float
    planning_hidden_s: float
    preparing_s: float
    expected_s: float
    ranks: tuple[RankTimes, ...]
    assignment: Assignment

    @property
    def exposed(self) -> ExposedSeconds:
        """Mean time that ranks waited for communication, in seconds."""
        return mean_exposed(self.ranks)

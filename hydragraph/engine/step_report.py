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
        step: number of the step, counted from 1.
        loss: sum of the global mini-batch's losses, divided by `divide_by`; by default the mean over target tokens.
        tokens: number of target tokens.
        grad_norm: norm of all gradients, before clipping; 0 for an evaluation.
        strategy: the strategy's text.
        chosen: the strategy as an object.
        micro_batches: number of micro-batches in each pipeline.
        seconds: wall time on this rank.
        padding: tokens added for sequence parallelism.
        planning_s: seconds that this step waited for planning.
        planning_hidden_s: seconds of planning that overlapped with training.
        preparing_s: seconds spent compiling new graphs and building programs.
        expected_s: step time predicted by the profile, or 0 without a profile.
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

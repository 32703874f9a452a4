"""The policy for planning iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.spec.argument_types import check_types


@dataclass(frozen=True)
class Policy:
    """Settings for planning iterations.

    Attributes:
        gain: fraction of time that choosing a strategy in every iteration must save over the best static strategy.
        sample: number of mini-batches for comparing strategies.
        workers: number of processes that plan ahead; 0: plan when a step begins.
        ahead: maximum number of mini-batches that are being planned or wait for their step.
        patience_s: seconds that a step waits for its plan before it uses the quick plan.
    """

    gain: float = 0.02
    sample: int = 8
    workers: int = 1
    ahead: int = 4
    patience_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types("", vars(self), Policy)
        for name, least in (("gain", 0), ("sample", 1), ("workers", 0), ("ahead", 1), ("patience_s", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name!r} is {getattr(self, name)!r}: give at least {least}")


@dataclass(frozen=True)
class Decision:
    """Decision between one static strategy and choosing one in every iteration.

    Attributes:
        static: index of the best static candidate, if any.
        gain: fraction of the static candidate's time that choosing per iteration saves.
        seconds: total seconds of each candidate (infinite if a mini-batch does not fit), then of choosing per
            iteration.
    """

    static: int | None
    gain: float
    dynamic: bool
    seconds: tuple[float, ...]

    def sentence(self, names: Sequence[str], gain: float) -> str:
        if self.static is None:
            return "a strategy is chosen every iteration: no candidate fits all sample mini-batches"
        what = f"{self.gain:.1%} less time than {names[self.static]} alone"
        if self.dynamic:
            return f"a strategy is chosen every iteration; this is expected to take {what}"
        return (
            f"the strategy stays {names[self.static]}: choosing one every iteration would take {what}, but the "
            f"required saving is {gain:.1%}"
        )


def static_or_dynamic(
    candidates: Sequence[Sequence[PipelineCost]],
    charges: Sequence[float],
    batches: Sequence[Sequence[int]],
    policy: Policy,
) -> Decision:
    from hydragraph.planner.assignment.best_candidate import compare_pipelines

    choices = [
        compare_pipelines(candidates, lengths, charges, all_of_them=True, seed=policy.seed)
        for lengths in batches[: policy.sample]
    ]
    totals = [sum((choice.verdicts[i].seconds for choice in choices), 0.0) for i in range(len(candidates))]
    chosen = sum((choice.seconds for choice in choices), 0.0)
    best = min(range(len(totals)), key=lambda i: (totals[i], i))
    if totals[best] == float("inf"):
        return Decision(None, 1.0, True, (*totals, chosen))
    gain = 1 - chosen / totals[best] if totals[best] else 0.0
    return Decision(best, gain, gain >= policy.gain, (*totals, chosen))

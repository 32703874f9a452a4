"""Training and evaluation on pairs of answers. A step scores them, then trains with weighted token losses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from hydragraph.data.mini_batches import IGNORED, Drawn
from hydragraph.engine.executable import Executable
from hydragraph.engine.step_report import StepReport
from hydragraph.spec.strategy import Strategy
from hydragraph.train.objective_config import PairLoss
from hydragraph.train.preference_objective import WEIGHTS, PairResult, evaluate_pairs


@dataclass(frozen=True, eq=False)
class PairReport(StepReport):
    """Report of a step on pairs, with `PairResult.figures` and the seconds of scoring (`scoring_s`)."""

    pairs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PairedSteps:
    """Steps and evaluations on pairs; the preferred answer precedes the rejected one.

    The model must be compiled with the loss `weighted_logprobs`.
    """

    executor: Executable
    loss: PairLoss

    def announce(self, sequences: Sequence[Drawn]) -> None:
        self.executor.announce(_weighted(sequences, [1.0] * len(sequences)))

    def step(self, sequences: Sequence[Drawn], strategy: Strategy | None) -> PairReport:
        """Train on a mini-batch; a FloatingPointError leaves the weights unchanged."""
        began = time.perf_counter()
        # The weights are derivatives of the pair losses by the scores, so weighted token losses
        # have the pair losses' gradient.
        pairs = self.evaluate(sequences, strategy)
        scoring_s = time.perf_counter() - began
        report = self.executor.step(_weighted(sequences, pairs.weights), strategy, divide_by=len(sequences) // 2)
        step_fields: dict[str, Any] = {f.name: getattr(report, f.name) for f in fields(StepReport)}
        step_fields["loss"] = pairs.loss
        return PairReport(**step_fields, pairs={**pairs.figures, "scoring_s": scoring_s})

    def weighted(self, sequences: Sequence[Drawn]) -> list[dict[str, Any]]:
        """Return a mini-batch with loss weights as if current scores were the reference scores."""
        scores = self.executor.score([_plain(answer) for answer in _answers(sequences)])
        scored = [{**answer, "reference": score} for answer, score in zip(_answers(sequences), scores, strict=True)]
        return _weighted(scored, self.evaluate(scored, None).weights)

    def evaluate(self, sequences: Sequence[Drawn], strategy: Strategy | None) -> PairResult:
        answers = _answers(sequences)
        scores = self.executor.score([_plain(answer) for answer in answers], strategy=strategy)
        targets = torch.tensor([int((answer["labels"][1:] != IGNORED).sum()) for answer in answers])
        unknown = torch.tensor(torch.nan)
        reference = torch.stack([answer.get("reference", unknown) for answer in answers])
        return evaluate_pairs(self.loss, scores, targets, reference)


def _answers(sequences: Sequence[Drawn]) -> list[dict[str, Tensor]]:
    return [one if isinstance(one, dict) else {"input_ids": one, "labels": one} for one in sequences]


def _plain(answer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": answer["input_ids"], "labels": answer["labels"]}


def _weighted(sequences: Sequence[Drawn], weights: Sequence[float]) -> list[dict[str, Any]]:
    return [{**_plain(one), WEIGHTS: weight} for one, weight in zip(_answers(sequences), weights, strict=True)]

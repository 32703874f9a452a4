"""Losses that compare a preferred with a rejected answer: DPO, SimPO and ORPO.

Each loss L depends on an answer only through its log-probability s, a sum over tokens. So dL/ds is the weight of its
tokens in the gradient, and a pair's answers can be on different ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.frontend.packed_inputs import token_logprobs
from hydragraph.train.objective_config import DpoConfig, OrpoConfig, PairLoss, SimpoConfig

WEIGHTS = "weights"
# Maximum log-probability per token: odds are infinite at 0
_SURE = -1e-7


def weighted_logprobs(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of token losses -log p, times each sequence's weight."""
    return -(token_logprobs(outputs, batch) * batch[WEIGHTS][0]).sum()


@dataclass(frozen=True, eq=False)
class Answers:
    """Preferred or rejected answers of n pairs, fp64 [n].

    Attributes:
        reference: log-probability before training; NaN: unknown.
    """

    scores: Tensor
    targets: Tensor
    reference: Tensor

    @property
    def means(self) -> Tensor:
        return self.scores / self.targets


def rewards(loss: PairLoss, answers: Answers) -> Tensor:
    """Return rewards, [n]; for ORPO, `weight` times the log-probability per token."""
    match loss:
        case DpoConfig():
            return loss.beta * (answers.scores - answers.reference)
        case SimpoConfig():
            return loss.beta * answers.means
        case OrpoConfig():
            return loss.weight * answers.means


def losses(loss: PairLoss, chosen: Answers, rejected: Answers) -> Tensor:
    match loss:
        case DpoConfig():
            margins = rewards(loss, chosen) - rewards(loss, rejected)
            swapped = loss.label_smoothing
            return -(1 - swapped) * F.logsigmoid(margins) - swapped * F.logsigmoid(-margins)
        case SimpoConfig():
            return -F.logsigmoid(rewards(loss, chosen) - rewards(loss, rejected) - loss.gamma)
        case OrpoConfig():
            return -chosen.means - loss.weight * F.logsigmoid(_log_odds(chosen.means) - _log_odds(rejected.means))


def _log_odds(means: Tensor) -> Tensor:
    # log(1 - p) = log(-expm1(log p)) is accurate even near p = 0 and 1.
    sure = means.clamp(max=_SURE)
    return sure - torch.log(-torch.expm1(sure))


@dataclass(frozen=True, eq=False)
class PairResult:
    """Losses of a mini-batch's pairs.

    Attributes:
        loss: mean over pairs.
        weights: factor of each answer's token losses -log p; the weighted sum has the gradient of the sum of pair
            losses.
        figures: means of `chosen_reward`, `rejected_reward`, `margin` (their difference) and `accuracy` (1 if the
            preferred answer has the higher reward, 0.5 for a tie). DPO adds `log_ratio`, the mean of log(p / p_ref).
    """

    pairs: int
    loss: float
    weights: list[float]
    figures: Mapping[str, float]


def mean_over_pairs(results: Sequence[PairResult], values: Sequence[float]) -> float:
    return sum(r.pairs * value for r, value in zip(results, values, strict=True)) / sum(r.pairs for r in results)


def evaluate_pairs(loss: PairLoss, scores: Tensor, targets: Tensor, reference: Tensor) -> PairResult:
    """Return the losses of pairs, and the answers' weights in the gradient.

    Args:
        scores: log-probabilities, [2n]; each preferred answer precedes its rejected answer.
        targets: number of tokens of each answer, [2n].
        reference: scores before training, [2n].

    Raises:
        FloatingPointError: a score is not finite.
    """
    needed = {"log-probability": scores} | ({"reference score": reference} if isinstance(loss, DpoConfig) else {})
    for what, values in needed.items():
        if not bool(torch.isfinite(values).all()):
            pair = int((~torch.isfinite(values)).nonzero()[0]) // 2
            raise FloatingPointError(f"the {what} of an answer is not finite, in pair {pair} of the mini-batch")
    scores = scores.double().requires_grad_()
    columns = scores, targets.double(), reference.double()
    # Preferred and rejected answers alternate.
    chosen, rejected = (Answers(*(column[i::2] for column in columns)) for i in (0, 1))
    pair_losses = losses(loss, chosen, rejected)
    # slopes: derivative of the loss by each score. Token losses are -log p: weights are -slopes.
    (slopes,) = torch.autograd.grad(pair_losses.sum(), scores)
    with torch.no_grad():
        better = rewards(loss, chosen)
        worse = rewards(loss, rejected)
        figures = {
            "chosen_reward": better.mean().item(),
            "rejected_reward": worse.mean().item(),
            "margin": (better - worse).mean().item(),
            "accuracy": ((better - worse).sign() + 1).mean().item() / 2,
        }
        if isinstance(loss, DpoConfig):
            figures["log_ratio"] = (scores - reference.double()).mean().item()
    return PairResult(len(pair_losses), pair_losses.mean().item(), (-slopes).tolist(), figures)

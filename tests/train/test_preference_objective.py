"""The losses of pairs are the papers' formulas, and the weights of their tokens are their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.train.objective_config import DpoConfig, OrpoConfig, PairLoss, SimpoConfig
from hydragraph.train.preference_objective import PairResult, evaluate_pairs, mean_over_pairs

Pair = tuple[float, float, int, int, float, float]  # scores, tokens and reference scores of both answers


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(loss: PairLoss, pair: Pair) -> float:
    """The loss of one pair, from the papers."""
    better, worse, n, m, reference, other = pair
    if isinstance(loss, DpoConfig):
        margin = loss.beta * ((better - reference) - (worse - other))
        swapped = loss.label_smoothing
        return -(1 - swapped) * math.log(sigmoid(margin)) - swapped * math.log(sigmoid(-margin))
    if isinstance(loss, SimpoConfig):
        return -math.log(sigmoid(loss.beta * better / n - loss.beta * worse / m - loss.gamma))
    p, q = math.exp(better / n), math.exp(worse / m)
    odds = math.log(p / (1 - p)) - math.log(q / (1 - q))
    return -better / n - loss.weight * math.log(sigmoid(odds))


LOSSES: list[PairLoss] = [DpoConfig(0.3), DpoConfig(0.1, 0.2), SimpoConfig(), SimpoConfig(2.5, 0.3), OrpoConfig(0.5)]
scores = st.floats(-60, -1)
pairs = st.lists(
    st.tuples(scores, scores, st.integers(1, 40), st.integers(1, 40), scores, scores), min_size=1, max_size=5
)


def evaluated(loss: PairLoss, drawn: list[Pair], moved: Tensor | None = None) -> PairResult:
    values = ([value for pair in drawn for value in pair[i : i + 2]] for i in (0, 2, 4))
    columns = [torch.tensor(each, dtype=torch.float64) for each in values]
    return evaluate_pairs(loss, columns[0] + (0 if moved is None else moved), columns[1], columns[2])


@given(drawn=pairs, loss=st.sampled_from(LOSSES))
def test_losses_are_the_formulas(drawn: list[Pair], loss: PairLoss) -> None:
    result = evaluated(loss, drawn)
    expected = [by_hand(loss, pair) for pair in drawn]
    assert result.pairs == len(drawn)
    assert result.loss == pytest.approx(sum(expected) / len(drawn), rel=1e-9)


@given(drawn=pairs, loss=st.sampled_from(LOSSES), data=st.data())
def test_weights_are_slopes(drawn: list[Pair], loss: PairLoss, data: st.DataObject) -> None:
    """Moving a score by a little changes the sum of the losses by its weight, with the sign of -log p."""
    i = data.draw(st.integers(0, 2 * len(drawn) - 1))
    step = torch.zeros(2 * len(drawn), dtype=torch.float64)
    step[i] = 1e-5
    up, down = (evaluated(loss, drawn, sign * step).loss * len(drawn) for sign in (1, -1))
    assert -evaluated(loss, drawn).weights[i] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-6)


def test_figures_are_means_over_pairs() -> None:
    result = evaluated(DpoConfig(0.5), [(-4.0, -6.0, 2, 3, -5.0, -5.0), (-3.0, -1.0, 1, 1, -3.0, -1.0)])
    assert result.figures["chosen_reward"] == pytest.approx(0.25)
    assert result.figures["rejected_reward"] == pytest.approx(-0.25)
    assert result.figures["margin"] == pytest.approx(0.5)
    assert result.figures["accuracy"] == pytest.approx(0.75)  # the second pair's rewards are equal
    assert result.figures["log_ratio"] == pytest.approx(0.0)
    assert "log_ratio" not in evaluated(OrpoConfig(), [(-4.0, -6.0, 2, 3, math.nan, math.nan)]).figures
    other = evaluated(SimpoConfig(), [(-4.0, -6.0, 2, 3, math.nan, math.nan)])
    assert mean_over_pairs([result, other], [1.0, 4.0]) == pytest.approx(2.0)


def test_a_certain_answer_has_finite_weights() -> None:
    result = evaluated(OrpoConfig(), [(0.0, -3.0, 2, 3, math.nan, math.nan)])
    assert all(map(math.isfinite, [result.loss, *result.weights]))


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_a_score_that_is_not_finite_is_named(score: float) -> None:
    for what, pair in {
        "log-probability": (-1.0, score, 1, 1, -1.0, -1.0),
        "reference score": (-1.0, -1.0, 1, 1, -1.0, score),
    }.items():
        with pytest.raises(FloatingPointError, match=f"the {what} of an answer is not finite, in pair 1 of the mini"):
            evaluated(DpoConfig(), [(-1.0, -1.0, 1, 1, -1.0, -1.0), pair])

"""Random cases: a few in every run, others every day; `python -m tests.fuzz --count 1000` runs many."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest

import hydragraph as hg
from tests.fuzz import PER_LAUNCH, RANKS, Case, ModelCase, differences, draw_model, launch_of
from tests.loss_cases import LossCase
from tests.loss_cases import outcome as outcome_of_loss
from tests.module_cases import draw, outcome
from tests.thorough import only
from tests.use_cases import UseCase
from tests.use_cases import outcome as outcome_of_use

MODULES = 3  # a day


def is_small(model: ModelCase, case: Case) -> bool:
    """Return whether a case takes few seconds; `python -m tests.fuzz` draws larger ones as well."""
    if model.layers > 2 or model.heads > 6 or model.kind == "mixtral":
        return False
    strategy = hg.Strategy.parse(case.strategy, model.layers)
    stages = [stage for pipeline in strategy.pipelines for stage in pipeline.stages]
    return max(strategy.devices) < 2 and all(stage.tp == 1 for stage in stages)


def test_todays_random_case_equals_one_device() -> None:
    seeds = itertools.count(datetime.date.today().toordinal() * 1000)
    drawn = ((seed, model, case) for seed in seeds for model, cases in [launch_of(seed)] for case in cases)
    seed, model, case = next(each for each in drawn if is_small(*each[1:]))
    assert not (wrong := differences(model, [case], ranks=2)), f"seed {seed}: {wrong}"


def test_cases_depend_on_their_seed_alone_and_fit_their_model() -> None:
    for seed in range(50):
        model, cases = launch_of(seed)
        assert (model, cases) == launch_of(seed)
        assert len(cases) == PER_LAUNCH
        for case in cases:
            hg.Strategy.parse(case.strategy, model.layers).check(model.layers, RANKS, (model.heads,))
    assert len({draw_model(seed) for seed in range(50)}) > 40


@only("0")
@pytest.mark.parametrize("number", range(MODULES))
def test_todays_random_modules_are_right_or_refused(number: int) -> None:
    seed = datetime.date.today().toordinal() * MODULES + number
    assert not (found := outcome(draw(seed))).startswith("WRONG"), f"seed {seed}: {found}"


@only("case3-refused: ")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (LossCase(1, "cross-entropy", ("weights",), "picked", 2.0), "right"),
        (LossCase(2, "smoothed", ("sequences clamped",), "sum", 2.0), "right"),
        (LossCase(3, "gathered", ("threshold of the mean",), "sum", 4.5), "refused: "),
        (LossCase(4, "token_logprobs", (), "clamped total", 2.0), "refused: "),
    ],
)
def test_a_loss_is_the_sum_over_sequences_or_refused(case: LossCase, expected: str) -> None:
    assert outcome_of_loss(case).startswith(expected)


@only("steps0-r")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (
            [("numpy", "targets", "save"), ("padded", "sequences", "schedule"), ("labels", 50, "load what was saved")],
            "r",
        ),
        ([("tensors", "targets", "nothing"), ("lists", "targets", "freeze")], "refused: out.weight: requires_grad was"),
    ],
)
def test_what_a_user_does_between_steps_is_followed_or_refused(steps: Any, expected: str) -> None:
    found = outcome_of_use(UseCase(1, "<tp1,pp1>", "AdamW", 0.5, tuple(steps)))
    assert found.startswith("right" if expected == "r" else expected), found

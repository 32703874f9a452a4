"""Expected and measured seconds: steps that count, when the difference is reported, and when it matters."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hydragraph.train.stragglers.expected_seconds import LEAST, STEPS, ExpectedAndMeasured, ExpectedTimes


@dataclass(frozen=True)
class Step:
    seconds: float
    expected_s: float = 0.5
    strategy: str = "<tp1,pp1>"
    preparing_s: float = 0.0


def compared(expectation: ExpectedTimes, steps: list[Step]) -> list[tuple[int, ExpectedAndMeasured]]:
    found = [
        (i, expectation.stepped(step.strategy, step.expected_s, step.seconds - step.preparing_s))
        for i, step in enumerate(steps, start=1)
    ]
    return [(i, beside) for i, beside in found if beside is not None]


def test_it_is_told_once_after_enough_steps_without_those_that_compile() -> None:
    steps = [Step(9.0), *[Step(0.6)] * 9, Step(7.0, strategy="<tp2,pp1>"), *[Step(0.7, preparing_s=0.1)] * 29]
    found = compared(ExpectedTimes(), steps)
    assert found == [(STEPS, ExpectedAndMeasured(0.5, pytest.approx(0.6), STEPS - 2))]  # pyrefly: ignore[bad-argument-type]
    assert str(found[0][1]) == "expected 0.5 s per step, measured 0.6 s (20% more; median of 18 steps)"


def test_steps_without_expectation_do_not_count() -> None:
    steps = [*[Step(0.6, expected_s=0.0)] * 30, *[Step(0.25)] * 10]
    ((at, beside),) = compared(ExpectedTimes(), steps)
    assert (at, beside.steps) == (30 + LEAST, LEAST)
    assert "50% less" in str(beside)
    assert not compared(ExpectedTimes(), [Step(0.6, expected_s=0.0)] * 60)


def test_another_plan_is_compared_again() -> None:
    expectation = ExpectedTimes()
    assert len(compared(expectation, [Step(0.6)] * 30)) == 1
    expectation.restart()
    assert [at for at, _ in compared(expectation, [Step(0.6)] * 30)] == [STEPS]


@pytest.mark.parametrize(
    ("measured", "matters"), [(1.0, False), (1.19, False), (0.84, False), (1.21, True), (0.8, True)]
)
def test_a_difference_of_a_fifth_matters(measured: float, matters: bool) -> None:
    assert ExpectedAndMeasured(1.0, measured, 18).matters is matters

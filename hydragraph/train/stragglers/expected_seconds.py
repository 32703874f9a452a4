"""Comparison of expected and measured step times."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

STEPS = 20
LEAST = 5
# Step times that differ by this factor cause another plan
MATTERS = 1.2


@dataclass(frozen=True)
class ExpectedAndMeasured:
    expected_s: float
    measured_s: float
    steps: int

    @property
    def matters(self) -> bool:
        ratio = self.measured_s / self.expected_s
        return not 1 / MATTERS <= ratio <= MATTERS

    def __str__(self) -> str:
        more = self.measured_s / self.expected_s - 1
        difference = f"{abs(more):.0%} {'more' if more > 0 else 'less'}; median of {self.steps} steps"
        return f"expected {self.expected_s:.3g} s per step, measured {self.measured_s:.3g} s ({difference})"


class ExpectedTimes:
    """Comparison of median expected and measured step times, without each strategy's slow first step."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._count = 0
        self._seen: set[str] = set()
        self._steps: list[tuple[float, float]] = []
        self._done = False

    def stepped(self, strategy: str, expected_s: float, measured_s: float) -> ExpectedAndMeasured | None:
        if self._done:
            return None
        self._count += 1
        if strategy in self._seen and expected_s > 0:
            self._steps.append((expected_s, measured_s))
        self._seen.add(strategy)
        if self._count < STEPS or len(self._steps) < LEAST:
            return None
        self._done = True
        expected, measured = zip(*self._steps, strict=True)
        return ExpectedAndMeasured(median(expected), median(measured), len(self._steps))

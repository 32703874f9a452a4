"""Estimation of ranks' slowdowns from noisy measurements.

Each iteration yields a measured and a predicted time for every rank and kind of work (blocks of one template, in one
kind of stage, on one type of device). Three unknowns explain the ratio:

    log(measured / predicted) = log factor(kind) + log common(iteration) + log rate(rank) + noise

- factor: the cost model's error for a kind of work; the median over iterations and healthy ranks.
- common: a slowdown of all ranks, as on a busy machine; the lower median over ranks.
- rate: the remaining slowdown of a rank. A rank becomes a straggler when, in NEEDED of the last OF iterations, its
  slowdown exceeds both `enter` and CERTAIN times the scatter of healthy ranks. If this second limit exceeds the square
  of `enter`, NEEDED and OF are doubled. The rank becomes healthy when its slowdown is below `leave` equally often.
- scatter: the larger of 1.4826 times the median deviation and half of the 95th percentile of deviations. Both estimate
  the standard deviation of normal errors; the percentile also detects bursts.

While a rank has less than LITTLE times the busiest rank's work, unpredicted costs dominate, so its rate can only fall.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any, TypeVar

# Minimum iterations before a kind's factor is used
CALIBRATION = 5
# Iterations in each median
WINDOW = 32
NEEDED = 3
OF = 4
CERTAIN = 3.0
# Minimum reported change of a rate, as a factor
CHANGE = 1.25
# The first slow iteration is ignored below this fraction of later slowdowns
PARTIAL = 0.85
LITTLE = 0.1
# Minimum share of calibrated kinds in a rank's predicted time
SHARED = 0.5

_T = TypeVar("_T")

Kind = Hashable
# Measured and predicted seconds, each above 0, by rank and kind of work.
Work = Mapping[int, Mapping[Any, tuple[float, float]]]


@dataclass(frozen=True)
class Sensitivity:
    """Thresholds: a slowdown above `enter` makes a rank a straggler, and one below `leave` makes it healthy."""

    enter: float = 1.3
    leave: float = 1.1


@dataclass(frozen=True)
class Change:
    """Change of a rank's rate; healthy ranks have rate 1."""

    rank: int
    before: float
    rate: float

    @property
    def recovered(self) -> bool:
        return self.rate == 1.0


class Estimator:
    """Estimator of ranks' rates.

    Args:
        certain: threshold for stragglers, as a multiple of healthy ranks' scatter.
    """

    def __init__(
        self,
        sensitivity: Sensitivity | None = None,
        certain: float = CERTAIN,
        held: Mapping[int, float] | None = None,
    ) -> None:
        self._sensitivity = sensitivity or Sensitivity()
        self._certain = certain
        self._held = dict(held or {})
        # Logarithms of the cost model's errors, by kind.
        self._errors: defaultdict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._residuals: dict[int, deque[float]] = {}
        # Residuals of the last iterations, by rank
        self._recent: deque[Mapping[int, float]] = deque()
        self._healthy: deque[Mapping[int, float]] = deque(maxlen=WINDOW)

    @property
    def rates(self) -> Mapping[int, float]:
        return dict(self._held)

    @property
    def scatter(self) -> float:
        by_rank: dict[int, list[float]] = {}
        for residuals in self._healthy:
            for rank, value in residuals.items():
                by_rank.setdefault(rank, []).append(value)
        # Deviations are relative to each rank's median: a constantly slow rank adds no noise.
        middles = {rank: median(values) for rank, values in by_rank.items()}
        deviations = sorted(abs(value - middles[rank]) for rank, values in by_rank.items() for value in values)
        if len(deviations) < 3:
            return 0.0
        return max(1.4826 * median(deviations), deviations[round(0.95 * (len(deviations) - 1))] / 2)

    def among(self, numbers: Mapping[int, int]) -> Estimator:
        """Return a copy for renumbered ranks; `numbers` maps remaining ranks' old to new numbers."""

        def anew(values: Mapping[int, _T]) -> dict[int, _T]:
            return {numbers[rank]: deepcopy(value) for rank, value in values.items() if rank in numbers}

        estimator = Estimator(self._sensitivity, self._certain)
        estimator._errors = deepcopy(self._errors)
        estimator._held = anew(self._held)
        estimator._residuals = anew(self._residuals)
        estimator._recent = deque(map(anew, self._recent))
        estimator._healthy = deque(map(anew, self._healthy), maxlen=WINDOW)
        return estimator

    def observe(self, work: Work, idle: Mapping[int, float] | None = None) -> tuple[Change, ...]:
        """Record one iteration; return the changed rates.

        Args:
            idle: measured slowdown of ranks that did not compute.
        """
        # log(measured / expected) = common + residual; `expected` includes the factors of work.
        rank_seconds = self._known(work)
        logs = {rank: math.log(measured / expected) for rank, (measured, expected) in rank_seconds.items()}
        common = self._common(logs)
        residuals = {rank: log - common for rank, log in logs.items()}
        self._learn(work, residuals, common)
        if residuals:
            self._recent.append(dict(residuals))
        # Only residuals older than the judged iterations count as healthy: a rank that has just
        # become slow would increase the scatter that judges it.
        if len(self._recent) > OF:
            # Leave out ranks that are stragglers now.
            then = self._recent.popleft()
            self._healthy.append({rank: value for rank, value in then.items() if rank not in self._held})
        little = LITTLE * max((expected for _, expected in rank_seconds.values()), default=0.0)
        for rank, rate in self._held.items():
            # With little work, fixed costs look like a slowdown: the rate must not rise.
            if rank in rank_seconds and rank_seconds[rank][1] < little:
                residuals[rank] = min(residuals[rank], math.log(rate))
        residuals |= {rank: math.log(ratio) for rank, ratio in (idle or {}).items()}
        return tuple(change for rank in sorted(residuals) if (change := self._judged(rank, residuals[rank])))

    def _known(self, work: Work) -> dict[int, tuple[float, float]]:
        rank_seconds = {}
        for rank, kinds in work.items():
            # known_kinds: calibrated kind -> (measured, predicted) seconds.
            known_kinds = {kind: pair for kind, pair in kinds.items() if len(self._errors[kind]) >= CALIBRATION}
            measured = sum(m for m, _ in known_kinds.values())
            whole = sum(predicted for _, predicted in kinds.values())
            if known_kinds and sum(predicted for _, predicted in known_kinds.values()) >= SHARED * whole:
                expected = sum(math.exp(median(self._errors[kind])) * pair[1] for kind, pair in known_kinds.items())
                rank_seconds[rank] = measured, expected
        return rank_seconds

    def _common(self, logs: Mapping[int, float]) -> float:
        # A straggler's wrong rate must not make others look slow.
        healthy = [log for rank, log in logs.items() if rank not in self._held]
        stragglers = [log - math.log(self._held[rank]) for rank, log in logs.items() if rank in self._held]
        return median_low(healthy or stragglers) if logs else 0.0

    def _learn(self, work: Work, residuals: Mapping[int, float], common: float) -> None:
        within = math.log(self._sensitivity.enter)
        by_kind: dict[Kind, dict[int, float]] = {}
        for rank, kinds in work.items():
            for kind, (measured, predicted) in kinds.items():
                by_kind.setdefault(kind, {})[rank] = math.log(measured / predicted)
        strange = self._strange(by_kind)
        for kind, logs in by_kind.items():
            samples = []
            for rank, log in logs.items():
                log_rate = math.log(self._held.get(rank, 1.0))
                if rank in residuals:
                    # A sample far from the rank's rate means that the rate changed, not the factor.
                    if abs(residuals[rank] - log_rate) < within:
                        samples.append(log - log_rate - common)
                else:
                    samples.append(log - log_rate - strange.get(rank, 0.0))
            if samples:
                self._errors[kind].append(median_low(samples))

    def _strange(self, by_kind: Mapping[Kind, Mapping[int, float]]) -> dict[int, float]:
        """Return the log slowdown of ranks that are much slower than others at the same work.

        The first sweep of a median polish (Tukey, 1977) separates the cost model's errors from slow ranks.
        """
        behind: dict[int, list[float]] = {}
        for logs in by_kind.values():
            if len(logs) > 1:
                base = median_low(logs.values())
                for rank, log in logs.items():
                    behind.setdefault(rank, []).append(log - base - math.log(self._held.get(rank, 1.0)))
        within = math.log(self._sensitivity.enter)
        return {rank: median_low(values) for rank, values in behind.items() if median_low(values) > within}

    def _judged(self, rank: int, residual: float) -> Change | None:
        # Older residuals in `every` count only while measurements are noisy.
        every = self._residuals.setdefault(rank, deque(maxlen=2 * OF))
        every.append(residual)
        if len(self._healthy) < NEEDED:
            # The scatter is unknown
            return None
        before = self._held.get(rank, 1.0)
        noise = self._certain * self.scatter
        bursts = noise > 2 * math.log(self._sensitivity.enter)
        last = list(every) if bursts else list(every)[-OF:]
        needed = 2 * NEEDED if bursts else NEEDED
        # A straggler with an unchanged rate must not count as healthy.
        leave = min(max(math.log(self._sensitivity.leave), noise / 2), 0.8 * math.log(before)) if before > 1 else 0.0
        if before > 1 and sum(value < leave for value in last) >= needed:
            return self._changed(rank, before, 1.0)
        margin = max(math.log(CHANGE if before > 1 else self._sensitivity.enter), noise)
        # beyond, below: residuals farther from the rank's rate than noise explains.
        beyond = [value for value in last if value - math.log(before) > margin]
        below = [value for value in last if value - math.log(before) < -margin] if before > 1 else []
        for values in (beyond, below):
            if len(values) >= needed:
                rate = self._rate(values)
                return self._changed(rank, before, rate if math.log(rate) > leave else 1.0)
        return None

    def _changed(self, rank: int, before: float, rate: float) -> Change:
        self._residuals[rank].clear()
        self._held.pop(rank, None)
        if rate > 1:
            self._held[rank] = rate
        return Change(rank, before, rate)

    @staticmethod
    def _rate(logs: Sequence[float]) -> float:
        ratios = [math.exp(log) for log in logs]
        # The slowdown may have begun within the first iteration.
        later = sum(ratios[1:]) / (len(ratios) - 1)
        if ratios[0] < PARTIAL * later:
            return later
        return sum(ratios) / len(ratios)

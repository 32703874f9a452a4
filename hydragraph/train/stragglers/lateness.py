"""Corrections to slow ranks' rates, learned from how long other ranks wait for their pipelines.

A rate (slowdown) scales only blocks' time, but a slow rank also packs and sends slowly. Therefore:

    late     time that ranks of healthy pipelines wait for gradients, divided by the rest of their step time (minimum
             over these ranks), minus the usual ratio when all ranks are healthy
    planned  rate that plans assume for slow ranks of a late pipeline: the previous rate times 1 + AHEAD * late

AHEAD exceeds 1, because part of a pipeline's time does not depend on its tokens. A correction that makes steps longer
is reverted, and no other is tried until rates change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from hydragraph.runtime.instruction_trace import RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers.straggler_state import LearnedSlowdown

AHEAD = 2.0
# Minimum lateness that is corrected
MATTERS = 0.05
LOOK = 4
# Steps without slow ranks that determine the usual wait
USUAL = 8


class Lateness:
    """Rates that plans should assume for slow ranks.

    Args:
        switched: whether the running plan was made for the current rates.
    """

    def __init__(self, switched: bool = False, learned: Mapping[int, LearnedSlowdown] | None = None) -> None:
        self._learned = dict(learned or {})
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._late: deque[tuple[float, frozenset[int]]] = deque(maxlen=LOOK)
        self._seconds: deque[float] = deque(maxlen=LOOK)
        self._open = switched
        # Step time and rates before the tested correction.
        self._before: tuple[float, dict[int, LearnedSlowdown]] | None = None
        # Whether the last correction did not help
        self._ended = False
        self._rates = Health()

    def among(self, numbers: Mapping[int, int], switched: bool = False) -> Lateness:
        late = Lateness(switched, {numbers[rank]: rates for rank, rates in self.learned.items() if rank in numbers})
        late._usual.extend(self._usual)
        return late

    @property
    def learned(self) -> Mapping[int, LearnedSlowdown]:
        """Learned rates by rank, without a correction that is being tested."""
        return dict(self._learned if self._before is None else self._before[1])

    def planned(self, health: Health) -> Health:
        self._told(health)
        return Health({rank: self._planned(rank, rate) for rank, rate in health.rates.items()})

    def switched(self) -> None:
        self._open = True
        self._late.clear()
        self._seconds.clear()

    def stepped(
        self,
        strategy: Strategy,
        assignment: Assignment,
        ranks: Sequence[RankTimes],
        health: Health,
        seconds: float,
    ) -> None:
        self._told(health)
        late = lateness(strategy, assignment, ranks, health)
        if not health.rates:
            self._usual.append(late[0])
            return
        self._late.append(late)
        self._seconds.append(seconds)
        if self._open and len(self._late) == LOOK:
            self._look(health)
            self._late.clear()
            self._seconds.clear()

    def _look(self, health: Health) -> None:
        # First decide on a correction being tested: if steps are longer than before, revert it, and
        # try no other until the rates change.
        now = median(self._seconds)
        if self._before is not None:
            seconds, learned = self._before
            self._before = None
            if now > seconds:
                self._learned = learned
                self._ended = True
                self._open = False
                return
        usual = median(self._usual) if self._usual else 0.0
        beyond = median(late for late, _ in self._late) - usual
        # Correct only ranks that were late in every step.
        who = frozenset.intersection(*(ranks for _, ranks in self._late))
        if self._ended or beyond < MATTERS or not who:
            return
        self._open = False
        self._before = now, dict(self._learned)
        for rank in who:
            rate = health.rate(rank)
            self._learned[rank] = LearnedSlowdown(rate, (1 + AHEAD * beyond) * self._planned(rank, rate))

    def _planned(self, rank: int, rate: float) -> float:
        learned = self._learned.get(rank)
        return max(rate, learned.planned) if learned is not None and learned.goes_for(rate) else rate

    def _told(self, health: Health) -> None:
        # While learned rates hold, small changes of rates keep the measurements.
        if health == self._rates or _alike(health, self._rates, self._learned):
            return
        self._rates = health
        if self._before is not None:
            self._learned = self._before[1]
            self._before = None
        self._ended = False
        self._late.clear()
        self._seconds.clear()


def _alike(health: Health, before: Health, learned: Mapping[int, LearnedSlowdown]) -> bool:
    def same(rank: int) -> bool:
        then = before.rate(rank)
        now = health.rate(rank)
        alternatives = (LearnedSlowdown(then, then), learned.get(rank, LearnedSlowdown(then, then)))
        return any(rates.goes_for(then) and rates.goes_for(now) for rates in alternatives)

    return set(health) == set(before) and all(map(same, health))


def lateness(
    strategy: Strategy, assignment: Assignment, ranks: Sequence[RankTimes], health: Health
) -> tuple[float, frozenset[int]]:
    """Return the wait for slow pipelines, divided by the rest of the step, and the slow ranks that are late."""
    used = [p.devices for p, batches in zip(strategy.pipelines, assignment.tokens, strict=True) if any(batches)]
    slow = [devices for devices in used if any(health.rate(rank) > 1 for rank in devices)]
    fast = [devices for devices in used if devices not in slow]
    if not fast:
        return 0.0, frozenset()
    # wait: least seconds of healthy pipelines' waits for gradients; rest: rest of that step.
    wait, rest = min(
        (ranks[rank].exposed.push, ranks[rank].seconds - ranks[rank].exposed.push)
        for devices in fast
        for rank in devices
    )
    # A slow pipeline that also waited did not delay other pipelines.
    late = [devices for devices in slow if min(ranks[rank].exposed.push for rank in devices) < wait / 2]
    who = frozenset(rank for devices in late for rank in devices if 1 < health.rate(rank) < math.inf)
    return (wait / rest if rest > 0 else 0.0), who

"""What a slow rank costs beyond its rate: how late its pipelines end, as those measure that wait for them.

A rate scales what blocks take. A slow rank also begins each micro-batch, packs and sends slowly, and one that is
stopped for most of the time answers late: none of it is in the cost model, and all of it is waited for. Plans let all
pipelines end together, so what is left out shows once a plan runs: the other pipelines wait for the last gradients.

    late     the least wait for pushes among ranks of pipelines without slow ranks, by the rest of their step,
             beyond what it is when all are well
    planned  a late pipeline's slow ranks are taken to be 1 + AHEAD late times as slow from then on

AHEAD is more than 1, since what is fixed does not shrink with a pipeline's share. So its share becomes less, and
nothing where nothing is best. A plan is only ever looked at until it is late; one that was made for less lateness and
made steps no shorter is taken back, and nothing more is tried as long as rates stay: it cannot go back and forth.

Rates are noisy, and told again whenever they have changed by a quarter. What was learned of a rank goes for rates that
are about the one it was learned with, however often they are told, also once the rank was well or had another rate
meanwhile, and among other ranks: it is of the device.

Example: rank 1 takes 13 times as long, and of a step of 2.2 s rank 0 waits 0.6 s at the end. It is planned as
13 x (1 + 2 x 0.6 / 1.6) = 22.8 times as slow; steps of 1.7 s follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hydragraph.runtime.instruction_trace import RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy

AHEAD = 2.0
MATTERS = 0.05  # of the rest of a step, that it must be late by
LOOK = 4  # steps that say how late a plan is
USUAL = 8  # healthy steps that say what waits are usual
SAME = 1.6  # rates farther apart are others: what `estimate.Sensitivity.change` lets pass, twice


@dataclass(frozen=True)
class _Learned:
    """What a rank is planned as: the rate that was known, and the one that it behaves like."""

    known: float
    planned: float

    def goes_for(self, rate: float) -> bool:
        """Say whether it was learned with about this rate; up to the one that is planned, that is no less."""
        return self.known / SAME <= rate <= max(self.planned, SAME * self.known)


class Lateness:
    """Learns from steps as which rates slow ranks are to be planned; on the rank that leads.

    Args:
        switched: whether the plan that runs was made for the rates there are.
        learned: of ranks, the rate with which it was learned, and the one that they are planned as.
    """

    def __init__(self, switched: bool = False, learned: Mapping[int, tuple[float, float]] | None = None) -> None:
        self._learned = {rank: _Learned(*each) for rank, each in (learned or {}).items()}
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._late: deque[tuple[float, frozenset[int]]] = deque(maxlen=LOOK)
        self._seconds: deque[float] = deque(maxlen=LOOK)
        self._open = switched  # the plan that runs was made for these rates, and has not been found to be late
        # What steps took before the last try, and what was planned then.
        self._before: tuple[float, dict[int, _Learned]] | None = None
        self._ended = False  # the last try was none
        self._rates = Health()  # with which it was begun to look, and to try

    def among(self, numbers: Mapping[int, int], switched: bool = False) -> Lateness:
        """Return one that knows ranks by other numbers, and what was learned of those that stay.

        Args:
            numbers: by those before; ranks without one are gone.
            switched: as for a new one.
        """
        found = Lateness(switched, {numbers[rank]: each for rank, each in self.learned.items() if rank in numbers})
        found._usual.extend(self._usual)
        return found

    @property
    def learned(self) -> Mapping[int, tuple[float, float]]:
        """What was learned of ranks, as a new one takes it; without a try that is under way."""
        learned = self._learned if self._before is None else self._before[1]
        return {rank: (each.known, each.planned) for rank, each in learned.items()}

    def planned(self, health: Health) -> Health:
        """Return the rates that plans are to go by."""
        self._told(health)
        return Health({rank: self._planned(rank, rate) for rank, rate in health.rates.items()})

    def switched(self) -> None:
        """Take down that another plan runs."""
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
        """Take in a step.

        Args:
            strategy, assignment, ranks: that it ran, and how each rank spent it.
            health: as it is known.
            seconds: that it took.
        """
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
        now = median(self._seconds)
        if self._before is not None:
            seconds, learned = self._before
            self._before = None
            if now > seconds:
                self._learned, self._ended, self._open = learned, True, False
                return
        usual = median(self._usual) if self._usual else 0.0
        beyond = median(late for late, _ in self._late) - usual
        who = frozenset.intersection(*(ranks for _, ranks in self._late))
        if self._ended or beyond < MATTERS or not who:
            return
        self._open = False
        self._before = now, dict(self._learned)
        for rank in who:
            rate = health.rate(rank)
            self._learned[rank] = _Learned(rate, (1 + AHEAD * beyond) * self._planned(rank, rate))

    def _planned(self, rank: int, rate: float) -> float:
        learned = self._learned.get(rank)
        return max(rate, learned.planned) if learned is not None and learned.goes_for(rate) else rate

    def _told(self, health: Health) -> None:
        """Begin anew where rates are others than those that were looked at: a try that was under way says nothing."""
        if health == self._rates or _alike(health, self._rates, self._learned):
            return
        self._rates = health
        if self._before is not None:
            self._learned, self._before = self._before[1], None
        self._ended = False
        self._late.clear()
        self._seconds.clear()


def _alike(health: Health, before: Health, learned: Mapping[int, _Learned]) -> bool:
    """Say whether rates are about what they were, or what was learned with these."""

    def same(rank: int) -> bool:
        then, now = before.rate(rank), health.rate(rank)
        known = (_Learned(then, then), learned.get(rank, _Learned(then, then)))
        return any(each.goes_for(then) and each.goes_for(now) for each in known)

    return set(health) == set(before) and all(map(same, health))


def lateness(
    strategy: Strategy, assignment: Assignment, ranks: Sequence[RankTimes], health: Health
) -> tuple[float, frozenset[int]]:
    """Return what part of the rest of a step others waited for pipelines with slow ranks, and for which slow ranks.

    Where all are well, it is what the last pipeline waited; where each pipeline has a slow rank, 0.
    """
    used = [p.devices for p, batches in zip(strategy.pipelines, assignment.tokens, strict=True) if any(batches)]
    slow = [devices for devices in used if any(health.rate(rank) > 1 for rank in devices)]
    fast = [devices for devices in used if devices not in slow]
    if not fast:
        return 0.0, frozenset()
    wait, rest = min(
        (ranks[rank].exposed.push, ranks[rank].seconds - ranks[rank].exposed.push)
        for devices in fast
        for rank in devices
    )
    # A pipeline that waited as well was not the one that all waited for.
    late = [devices for devices in slow if min(ranks[rank].exposed.push for rank in devices) < wait / 2]
    who = frozenset(rank for devices in late for rank in devices if 1 < health.rate(rank) < math.inf)
    return (wait / rest if rest > 0 else 0.0), who

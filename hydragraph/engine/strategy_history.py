"""Strategies of earlier sets of ranks; seats (initial ranks) identify devices across recoveries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.strategy import Strategy

KEPT = 8


@dataclass(frozen=True)
class TrainingPeriod:
    """Seats that trained together, and their strategies by seat, most recent first."""

    seats: frozenset[int]
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class StrategyHistory:
    seats: tuple[int, ...] | None = None
    periods: tuple[TrainingPeriod, ...] = ()

    def ended(self, strategies: Sequence[Strategy], ranks: int) -> StrategyHistory:
        """Return the history including the current ranks' `strategies` (most recent first)."""
        if not strategies:
            return self
        seats = tuple(range(ranks)) if self.seats is None else self.seats
        here = frozenset(seats)
        same = (strategy for period in self.periods if period.seats == here for strategy in period.strategies)
        # Ranks become seats: a strategy's rank r ran in seat `seats[r]`. `dict.fromkeys` keeps the
        # first of equal strategies.
        ran = dict.fromkeys((*(s.renumbered(dict(enumerate(seats))) for s in strategies), *same))
        earlier = (period for period in self.periods if period.seats != here)
        return replace(self, periods=(TrainingPeriod(here, tuple(ran)[:KEPT]), *earlier)[:KEPT])

    def among(self, seats: Sequence[int]) -> tuple[Strategy, ...]:
        """Return strategies with ranks numbered by position in `seats`; other seats get higher numbers.

        Strategies of exactly these seats come first, then the most recent.
        """
        # seats (2, 0, 3): number = {2: 0, 0: 1, 3: 2}; a strategy on seats 0 and 2
        #   becomes one on ranks 1 and 0
        number = {seat: rank for rank, seat in enumerate(seats)}
        for period in self.periods:
            for seat in sorted(period.seats):
                number.setdefault(seat, len(number))
        ordered = sorted(self.periods, key=lambda period: period.seats != set(seats))
        return tuple(dict.fromkeys(s.renumbered(number) for period in ordered for s in period.strategies))

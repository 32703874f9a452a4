"""Strategies that ran on earlier sets of ranks. Ranks are renumbered in recoveries; seats are stable.

ranks 0 1 2 3 in seats 0 1 2 3   <tp1,pp2> on ranks 0, 1 + <tp1,pp2> on ranks 2, 3
rank 1 is lost: ranks 0 1 2      in seats 0 2 3: <[0,?]..> + <tp1,pp2> on ranks 1, 2; the other pipeline is cut
another takes its seat           in seats 0 2 3 1, perhaps: the earlier strategy is known, on ranks 0, 3 and 1, 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.strategy import Strategy

KEPT = 8


@dataclass(frozen=True)
class Era:
    """One set of ranks that met and trained.

    Attributes:
        strategies: most recent first, with seats in place of ranks.
    """

    seats: frozenset[int]
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class Past:
    """History known to one process.

    Attributes:
        seats: seats of the current ranks, by rank; None: every rank's seat equals its number.
    """

    seats: tuple[int, ...] | None = None
    eras: tuple[Era, ...] = ()

    def ended(self, strategies: Sequence[Strategy], ranks: int) -> Past:
        """Return the history after these ranks, which trained with `strategies`, most recent first."""
        if not strategies:
            return self
        seats = tuple(range(ranks)) if self.seats is None else self.seats
        here = frozenset(seats)
        same = (strategy for era in self.eras if era.seats == here for strategy in era.strategies)
        ran = dict.fromkeys((*(s.renumbered(dict(enumerate(seats))) for s in strategies), *same))
        earlier = (era for era in self.eras if era.seats != here)
        return replace(self, eras=(Era(here, tuple(ran)[:KEPT]), *earlier)[:KEPT])

    def among(self, seats: Sequence[int]) -> tuple[Strategy, ...]:
        """Return earlier strategies for ranks in these seats; seats without a rank get higher numbers.

        Those that ran on the same seats come first, then the most recent.
        """
        number = {seat: rank for rank, seat in enumerate(seats)}
        for era in self.eras:
            for seat in sorted(era.seats):
                number.setdefault(seat, len(number))
        ordered = sorted(self.eras, key=lambda era: era.seats != set(seats))
        return tuple(dict.fromkeys(s.renumbered(number) for era in ordered for s in era.strategies))

"""What ran among ranks that there were: ranks are renumbered when some are lost or come, seats stay.

ranks 0 1 2 3 in seats 0 1 2 3   <tp1,pp2> on ranks 0, 1 + <tp1,pp2> on ranks 2, 3
rank 1 is lost: ranks 0 1 2      in seats 0 2 3: <[0,?]..> + <tp1,pp2> on ranks 1, 2; the other pipeline is cut
another takes its seat           in seats 0 2 3 1, perhaps: what ran there before is known, on ranks 0, 3 and 1, 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.strategy import Strategy

KEPT = 8


@dataclass(frozen=True)
class Era:
    """Ranks that met, and trained.

    Attributes:
        seats: in which they sat.
        strategies: that they trained with, the last one first, on seats for ranks.
    """

    seats: frozenset[int]
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class Past:
    """What one process remembers.

    Attributes:
        seats: of the ranks there are, by rank; None: every rank sits in the seat of its number.
        eras: the newest first.
    """

    seats: tuple[int, ...] | None = None
    eras: tuple[Era, ...] = ()

    def ended(self, strategies: Sequence[Strategy], ranks: int) -> Past:
        """Return what is remembered when ranks part.

        Args:
            strategies: that they have trained with, the last one first.
            ranks: how many there were.
        """
        if not strategies:
            return self
        seats = tuple(range(ranks)) if self.seats is None else self.seats
        here = frozenset(seats)
        same = (strategy for era in self.eras if era.seats == here for strategy in era.strategies)
        ran = dict.fromkeys((*(s.renumbered(dict(enumerate(seats))) for s in strategies), *same))
        earlier = (era for era in self.eras if era.seats != here)
        return replace(self, eras=(Era(here, tuple(ran)[:KEPT]), *earlier)[:KEPT])

    def among(self, seats: Sequence[int]) -> tuple[Strategy, ...]:
        """Return what ran, the most useful first, on ranks that sit in these seats; empty seats get numbers beyond.

        What ran among the same seats comes first, then what ran last.
        """
        number = {seat: rank for rank, seat in enumerate(seats)}
        for era in self.eras:
            for seat in sorted(era.seats):
                number.setdefault(seat, len(number))
        ordered = sorted(self.eras, key=lambda era: era.seats != set(seats))
        return tuple(dict.fromkeys(s.renumbered(number) for era in ordered for s in era.strategies))

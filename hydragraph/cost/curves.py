"""Curves: functions that return the seconds of a computation for one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from hydragraph.cost.reach import AttentionReach, Near, total


class LengthSums:
    """Sums of l and of l^2 over the lengths l of a micro-batch's sequences."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.tokens = sum(lengths)
        self.squared: int = sum(map(mul, lengths, lengths))
        self._pairs: dict[AttentionReach, float] = {}

    def pairs(self, reach: AttentionReach) -> float:
        """Return the sum of q(l) (`cost.reach`) over the sequences."""
        if reach not in self._pairs:
            self._pairs[reach] = float(sum(map(reach.pairs, self.lengths)))
        return self._pairs[reach]


@dataclass(frozen=True)
class Constants:
    """Seconds of a micro-batch: c + sum of (a * l^2 + b * l + near * q(l)) over sequences of l tokens.

    Attributes:
        a, b, c: s / token^2, s / token and s.
        near: s per unit of q(l) (`cost.reach`), by attention window or chunk size.
    """

    a: float
    b: float
    c: float
    near: Near = ()

    @property
    def failed(self) -> bool:
        attends = self.a > 0 or bool(self.near)
        return not (attends and (self.b > 0 or any(pair_s > 0 for _, pair_s in self.near)) and self.c >= 0)

    def seconds(self, lengths: Sequence[int]) -> float:
        return self.at(LengthSums(lengths))

    def at(self, load: LengthSums) -> float:
        seconds = self.a * load.squared + self.b * load.tokens + self.c
        for reach, pair_s in self.near:
            seconds += pair_s * load.pairs(reach)
        return seconds

    def work(self, length: Any) -> Any:
        """Return the seconds of a sequence of `length` tokens (or an array), without c."""
        seconds = (self.a * length + self.b) * length
        for reach, pair_s in self.near:
            seconds = seconds + pair_s * reach.pairs(length)
        return seconds

    def times(self, factor: float) -> Constants:
        return Constants(self.a * factor, self.b * factor, self.c * factor, total([(factor, self.near)]))

    @classmethod
    def sum(cls, parts: Iterable[tuple[float, Constants]]) -> Constants:
        a = b = c = 0.0
        nears = []
        for factor, k in parts:
            a += factor * k.a
            b += factor * k.b
            c += factor * k.c
            nears.append((factor, k.near))
        return cls(a, b, c, total(nears))


ZERO = Constants(0.0, 0.0, 0.0)

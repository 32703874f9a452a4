"""Curves: functions that return the seconds of a computation for one micro-batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any

from hydragraph.cost.reach import Near, Reach, total
from hydragraph.errors import Unsupported

BEYOND = 2.0


class Load:
    """Sums over the lengths l of a micro-batch's sequences.

    Attributes:
        tokens: sum l.
        squared: sum l^2.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.tokens = sum(lengths)
        self.squared: int = sum(map(mul, lengths, lengths))
        self._pairs: dict[Reach, float] = {}

    def pairs(self, reach: Reach) -> float:
        """Return the sum of q(l) (`cost.reach`) over the sequences."""
        if reach not in self._pairs:
            self._pairs[reach] = float(sum(map(reach.pairs, self.lengths)))
        return self._pairs[reach]


@dataclass(frozen=True)
class Constants:
    """Seconds for one micro-batch: c + the sum of (a l^2 + b l + near q(l)) over sequences of l tokens.

    Attributes:
        a, b, c: s / token^2, s / token and s.
        near: s per unit of q(l) (`cost.reach`), for each attention window or chunk size.
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
        return self.at(Load(lengths))

    def at(self, load: Load) -> float:
        seconds = self.a * load.squared + self.b * load.tokens + self.c
        for reach, pair_s in self.near:
            seconds += pair_s * load.pairs(reach)
        return seconds

    def work(self, length: Any) -> Any:
        """Return the seconds of a sequence of `length` tokens, without c; `length` may be an array."""
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


@dataclass(frozen=True)
class Table:
    """Measured seconds: rows of (sequences, total tokens, seconds).

    Seconds are interpolated linearly over the tokens, then over the mean length sum l^2 / sum l. Outside the measured
    range, the first and last segments are extended, to at most twice the measured tokens and never below 0 seconds.
    """

    rows: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        rows = tuple(sorted((int(s), int(t), float(x)) for s, t, x in self.rows))
        object.__setattr__(self, "rows", rows)
        if not rows or len({row[:2] for row in rows}) != len(rows):
            raise ValueError(f"the table has {len(rows)} rows: give at least one, and each (sequences, tokens) once")
        for sequences, tokens, seconds in rows:
            if sequences < 1 or tokens < sequences or not seconds >= 0:
                raise ValueError(f"the table has {seconds} s for {sequences} sequences with a total of {tokens} tokens")

    @cached_property
    def _lines(self) -> tuple[tuple[float, tuple[tuple[float, float], ...]], ...]:
        by_length: dict[float, list[tuple[float, float]]] = {}
        for sequences, tokens, seconds in self.rows:
            by_length.setdefault(tokens / sequences, []).append((float(tokens), seconds))
        return tuple((length, tuple(sorted(points))) for length, points in sorted(by_length.items()))

    def seconds(self, lengths: Sequence[int]) -> float:
        return self.at(Load(lengths))

    def at(self, load: Load) -> float:
        """Return a micro-batch's seconds.

        Raises:
            Unsupported: the micro-batch has more than twice the measured tokens.
        """
        tokens = load.tokens
        if tokens <= 0:
            return 0.0
        most = max(row[1] for row in self.rows)
        if tokens > BEYOND * most:
            raise Unsupported(
                f"a micro-batch has {tokens:.0f} tokens, but at most {most} were measured",
                where="profile",
                remedy="measure larger micro-batches, or make this one smaller",
            )
        length = load.squared / tokens
        at = bisect_left([measured for measured, _ in self._lines], length)
        if at == 0 or at == len(self._lines):
            return _on_line(self._lines[min(at, len(self._lines) - 1)][1], tokens)
        low, below = self._lines[at - 1]
        high, above = self._lines[at]
        shorter = _on_line(below, tokens)
        longer = _on_line(above, tokens)
        return shorter + (longer - shorter) * (length - low) / (high - low)

    def least_per_token(self, low: float, high: float) -> float:
        """Return a lower bound on the seconds per token, for `low` to `high` tokens."""
        # The minimum of a segment is at one of its ends.
        most = min(high, BEYOND * max(row[1] for row in self.rows))
        least = []
        for _, points in self._lines:
            at = {min(low, most), most, *(tokens for tokens, _ in points if low < tokens < most)}
            least += [_on_line(points, tokens) / tokens for tokens in at]
        return min(least)

    def constants(self) -> Constants:
        """Return approximate `Constants`, for search."""
        import numpy as np
        from scipy.optimize import nnls  # only needed for fitting

        rows = np.array([[tokens * tokens / n, tokens, 1.0] for n, tokens, x in self.rows if x > 0])
        if not len(rows):
            return Constants(0.0, 0.0, 0.0)
        rows /= np.array([x for _, _, x in self.rows if x > 0])[:, None]  # for relative errors
        # At a single length, l^2 and l are proportional.
        used = [1, 2] if len(self._lines) == 1 else [0, 1, 2]
        scale = np.linalg.norm(rows[:, used], axis=0)
        constants = np.zeros(3)
        constants[used] = nnls(rows[:, used] / scale, np.ones(len(rows)))[0] / scale
        a, b, c = constants.tolist()
        return Constants(a, b, c)

    def times(self, factor: float) -> Table:
        return Table(tuple((s, t, x * factor) for s, t, x in self.rows))


Curve = Constants | Table


def curve_record(curve: Curve) -> Any:
    """Return a JSON value: {a, b, c, near}, or [[sequences, tokens, seconds], ...]."""
    if isinstance(curve, Table):
        return [list(row) for row in curve.rows]
    record: dict[str, Any] = {"a": curve.a, "b": curve.b, "c": curve.c}
    if curve.near:
        record["near"] = [{"window": r.window, "chunk": r.chunk, "seconds": pair_s} for r, pair_s in curve.near]
    return record


def read_curve(data: Any) -> Curve:
    return read_constants(data) if isinstance(data, dict) else Table(tuple(tuple(row) for row in data))


def read_constants(data: Mapping[str, Any]) -> Constants:
    near = tuple((Reach(term["window"], term["chunk"]), term["seconds"]) for term in data.get("near", ()))
    return Constants(**{**data, "near": near})


def _on_line(points: tuple[tuple[float, float], ...], tokens: float) -> float:
    if len(points) == 1:
        return points[0][1] * tokens / points[0][0]
    i = min(max(1, bisect_left([at for at, _ in points], tokens)), len(points) - 1)
    low, early = points[i - 1]
    high, late = points[i]
    return max(0.0, early + (late - early) * (tokens - low) / (high - low))

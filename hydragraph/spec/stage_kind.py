"""Kinds of stages, and the parts of a stage on its ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class StageKind(NamedTuple):
    """Settings that determine a stage's graphs, as in `Stage`."""

    tp: int = 1
    sequence_parallel: bool = False
    recompute: bool | float = False
    sums_in_pieces: bool = False

    @property
    def text(self) -> str:
        """Name such as tp2sr0.5: degree 2, with the flags sr0.5."""
        flags = "s" * self.sequence_parallel + recompute_flag(self.recompute) + "p" * self.sums_in_pieces
        return f"tp{self.tp}{flags}"

    @property
    def marks(self) -> tuple[str, ...]:
        budget = "" if isinstance(self.recompute, bool) else f" within a memory budget of {self.recompute:g}"
        return (
            *["sequence parallel"] * self.sequence_parallel,
            *[f"recomputed{budget}"] * bool(self.recompute),
            *["sums in pieces"] * self.sums_in_pieces,
        )

    @classmethod
    def parse(cls, text: str) -> StageKind:
        """Parse a name such as tp2sr, or raise a ValueError."""
        match = re.fullmatch(r"tp([1-9]\d*)(s?)(r?)(0\.\d\d?)?(p?)", text)
        budget = float(match[4]) if match and match[4] else None
        if match is None or (budget is not None and not (match[3] and is_budget(budget))):
            raise ValueError(
                f"{text!r} is not a kind of stage: write tp2, tp2s (sequence parallel), tp2sr (recomputed), tp2sr0.5 "
                "(recomputed within a memory budget) or tp2p (sums in pieces)"
            )
        return cls(int(match[1]), bool(match[2]), bool(match[3]) if budget is None else budget, bool(match[5]))

    def parts(self) -> tuple[StagePart, ...]:
        return tuple(StagePart(self, index) for index in range(self.tp))


# Pieces with `sums_in_pieces`; more would hide more communication, but each adds latency.
PIECES = 2
# Memory budgets that the planner proposes; each needs a compilation.
BUDGETS = (0.75, 0.5, 0.25)


def is_budget(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1 and round(value, 2) == value


def recompute_flag(recompute: bool | float) -> str:
    return "r" * bool(recompute) + ("" if isinstance(recompute, bool) else f"{recompute:g}")


@dataclass(frozen=True)
class StagePart:
    """One rank's part of a stage, such as tp2s:1 for the second of two."""

    kind: StageKind = StageKind()  # noqa: RUF009
    index: int = 0

    @property
    def tp(self) -> int:
        return self.kind.tp

    @property
    def sequence_parallel(self) -> bool:
        return self.kind.sequence_parallel

    @property
    def recompute(self) -> bool | float:
        return self.kind.recompute

    def __str__(self) -> str:
        return f"{self.kind.text}:{self.index}"

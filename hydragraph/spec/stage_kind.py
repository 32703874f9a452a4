"""Kinds of stages, and the parts of their ranks: all that the graphs of a block on one rank depend on.

    kind    tp2s   two ranks, tokens split between products (sequence parallel); tp2sr: and recomputed
    part    tp2s:1 the second of these ranks

Another way of dividing a block among the ranks of a stage (by context, by experts) would be another field of the kind,
and the rank's coordinate in it another field of the part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class StageKind(NamedTuple):
    """How the ranks of a stage compute their blocks; stages of one kind run equal graphs and cost the same.

    Attributes:
        tp: number of ranks that share each block: the tensor-parallel degree.
        sequence_parallel: whether hidden states are cut along the tokens between products.
        recompute: whether a forward saves only its inputs, and the backward runs it again.
    """

    tp: int = 1
    sequence_parallel: bool = False
    recompute: bool = False

    @property
    def text(self) -> str:
        """A short name, as a strategy's text marks stages: tp2, tp2s, tp2sr."""
        return f"tp{self.tp}{'s' * self.sequence_parallel}{'r' * self.recompute}"

    @classmethod
    def parse(cls, text: str) -> StageKind:
        """Parse a name in the form of `text`.

        Raises:
            ValueError: it has another form.
        """
        match = re.fullmatch(r"tp([1-9]\d*)(s?)(r?)", text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a kind of stage: write tp2, tp2s (sequence parallel) or tp2sr (recomputed)"
            )
        return cls(int(match[1]), bool(match[2]), bool(match[3]))

    def parts(self) -> tuple[StagePart, ...]:
        """Return the parts of all its ranks, in order."""
        return tuple(StagePart(self, index) for index in range(self.tp))


@dataclass(frozen=True)
class StagePart:
    """The part of a stage on one rank.

    Attributes:
        kind: of the stage.
        index: the rank's position among the stage's ranks, from 0 in tensor-parallel order.
    """

    kind: StageKind = StageKind()  # noqa: RUF009
    index: int = 0

    @property
    def tp(self) -> int:
        """Number of ranks that share each block."""
        return self.kind.tp

    @property
    def sequence_parallel(self) -> bool:
        """Whether hidden states are cut along the tokens between products."""
        return self.kind.sequence_parallel

    @property
    def recompute(self) -> bool:
        """Whether its backwards run the forwards again."""
        return self.kind.recompute

    def __str__(self) -> str:
        return f"{self.kind.text}:{self.index}"

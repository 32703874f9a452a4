"""What ranks do next, agreed on at the end of a step, so that the next one begins without a meeting.

    nothing promised                         promised
    step 7 ... commit 7                      step 7 ... check and digest mini-batch 8, commit 7 (with the digests)
    check and digest mini-batch 8            step 8
    compare digests: all ranks meet
    step 8

The digests travel with the numbers that ranks add up at a commit anyway. A rank that is slow, or stopped for a part of
the time, is so waited for once a step and not twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydragraph.engine.session import RanksCompared
from hydragraph.frontend.mini_batch import MiniBatch
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Call:
    """What this rank is about to run, checked.

    Attributes:
        batch, strategy: None where it is refused; a strategy also where none was given.
        refused: why.
        mark: a digest of all this: of a refusal, too, so that ranks which all refuse the same go on alike.
    """

    batch: MiniBatch | None
    strategy: Strategy | None
    refused: Exception | None
    mark: int


@dataclass(eq=False)
class Promise:
    """A step that comes behind the one that is under way.

    Attributes:
        sequences, strategy: that it will be called with.
        call: these, checked, once gradients of the step before are on their way.
        ranks: what ranks have learned of one another at its commit.
    """

    sequences: Batches
    strategy: Strategy | str | None
    call: Call | None = None
    ranks: RanksCompared | None = None

    def heard(self, said: Sequence[tuple[int, ...]]) -> bool:
        """Take in what all ranks have said; return whether all have promised the same."""
        self.ranks = RanksCompared.of(said)
        return self.ranks.same

    @property
    def agreed(self) -> tuple[Call, RanksCompared]:
        """The call, and what ranks know of one another; once all have promised it."""
        assert self.call is not None, "ranks compare what they have checked"
        assert self.ranks is not None, "ranks have met at a commit"
        return self.call, self.ranks

    def is_of(self, sequences: Batches, strategy: Strategy | str | None) -> bool:
        """Say whether it is kept by a step that is called with this."""
        return sequences is self.sequences and strategy == self.strategy

"""Agreement on the next step during the current step, so that ranks wait for a slow rank only once per step.

Ranks check the promised mini-batch before they commit the current step, and compare digests at the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydragraph.engine.session import RanksCompared
from hydragraph.frontend.mini_batch import DivideBy, MiniBatch
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True, eq=False)
class StepCall:
    """Checked inputs of this rank's next iteration.

    Attributes:
        batch: mini-batch, or None if rejected.
        strategy: requested strategy, if any.
        mark: digest of the call or, if rejected, of the error.
    """

    batch: MiniBatch | None
    strategy: Strategy | None
    refused: Exception | None
    mark: int


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of an iteration, as for `Executable.step`."""

    sequences: Batches
    strategy: Strategy | str | None
    divide_by: DivideBy = "targets"

    def same_as(self, other: Inputs) -> bool:
        equal = (self.strategy, self.divide_by) == (other.strategy, other.divide_by)
        return equal and self.sequences is other.sequences


@dataclass(eq=False)
class AgreedStep:
    """Promise of the step after the current one; `call` is set once arguments are checked."""

    inputs: Inputs
    call: StepCall | None = None
    ranks: RanksCompared | None = None

    def heard(self, said: Sequence[tuple[int, ...]]) -> bool:
        self.ranks = RanksCompared.of(said)
        return self.ranks.same

    @property
    def agreed(self) -> tuple[StepCall, RanksCompared]:
        assert self.call is not None, "ranks agree on a promised step only after its arguments are checked"
        assert self.ranks is not None, "ranks agree on a promised step only when the step before it commits"
        return self.call, self.ranks

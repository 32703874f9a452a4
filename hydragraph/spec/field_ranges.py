"""Valid values of a mini-batch's fields, which `passes.find_field_ranges` finds."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch
from torch import Tensor

from hydragraph.spec.workload import IGNORED, Sequence


@dataclass(frozen=True, order=True)
class FieldRange:
    """Valid values [low, high) of a field that indexes an embedding table or is a target of the loss.

    Attributes:
        where: the table's name in the model, or "the loss".
        ignored: value of positions without a target, besides -100 in labels; None for a table.
    """

    field: str
    low: int
    high: int
    where: str
    ignored: int | None = None

    def check(self, sequence: Sequence, index: int) -> None:
        if self.field == "position_ids":
            if len(sequence) > self.high:
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens, but {self.where} has {self.high} positions; "
                    "truncate the sequence, or build the model with more positions"
                )
            return
        values = self._values(sequence)
        outside = self._outside(values)
        if outside is not None:
            at = [int(n) for n in outside]
            # Causal models' labels were shifted, but users know the original positions.
            place = at[0] + sequence.moved * (self.field == "labels")
            raise ValueError(
                f"sequence {index}: {self.field} is {int(values[tuple(at)])} at position {place}, outside the range "
                f"{self.low} to {self.high - 1} of {self.where}; correct the data, or build the model with more rows"
            )

    def holds(self, sequences: Sequence_[Sequence]) -> bool:
        if self.field == "position_ids":
            return all(len(sequence) <= self.high for sequence in sequences)
        return not sequences or self._outside(torch.cat([self._values(s) for s in sequences])) is None

    def _values(self, sequence: Sequence) -> Tensor:
        return {"input_ids": sequence.ids, "labels": sequence.labels, **sequence.extra}[self.field]

    def _outside(self, values: Tensor) -> Tensor | None:
        if not values.numel():
            return None
        # Usually, the extremes suffice; search only if they are ignored values.
        least, most = torch.aminmax(values)
        if self.low <= int(least) and int(most) < self.high:
            return None
        wrong = (values < self.low) | (values >= self.high)
        if self.field == "labels":
            wrong &= values != IGNORED
        if self.ignored is not None:
            wrong &= values != self.ignored
        indices = wrong.nonzero()
        return indices[0] if len(indices) else None

"""One iteration's work: sequences, and which pipeline computes which of them in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydragraph.errors import Unsupported

IGNORED = -100  # PyTorch's default ignore_index: a token with this label is no target


@dataclass(frozen=True, eq=False)
class Sequence:
    """One sequence: token ids [L] and, aligned with them, the label of each position [L] (-100: no target)."""

    ids: Tensor
    labels: Tensor

    @property
    def targets(self) -> int:
        """How many positions count in the loss."""
        return int((self.labels != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Assignment:
    """For one iteration, sequences -> (pipeline, micro-batch).

    Attributes:
        micro_batches: per pipeline, per micro-batch, the indices of its sequences. A pipeline may get none.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many micro-batches each pipeline runs."""
        return tuple(len(m) for m in self.micro_batches)


def sequence_of(given: Tensor | dict[str, Tensor], index: int, causal: bool) -> Sequence:
    """Check what a user passed as one sequence and align its labels.

    Args:
        given: ids, 1-D int64; or {"input_ids": ids, "labels": labels}, -100 where a label does not count.
        index: its place in the mini-batch, for errors.
        causal: labels are shifted by one here; otherwise they must be given and stay where they are.
    """
    fields = given if isinstance(given, dict) else {"input_ids": given}
    unknown = set(fields) - {"input_ids", "labels"}
    if unknown or "input_ids" not in fields:
        what = f"unknown fields {sorted(unknown)}" if unknown else "no input_ids"
        raise Unsupported(
            what, where=f"sequence {index}", remedy="pass input_ids and labels only; sequences are packed"
        )
    ids = fields["input_ids"]
    for name, value in fields.items():
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != ids.shape or value.dim() != 1:
            described = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"sequence {index}: {name} is {described}; pass 1-D int64 tensors of equal length")
    if not causal and "labels" not in fields:
        raise ValueError(f"sequence {index} has no labels; masked models need them (-100 where a token does not count)")
    labels = fields.get("labels", ids)
    if causal:
        labels = torch.cat([labels[1:], labels.new_full((min(1, len(ids)),), IGNORED)])
    return Sequence(ids, labels)

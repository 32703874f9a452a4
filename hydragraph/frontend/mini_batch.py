"""Validation of mini-batches, and packing of micro-batches."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hydragraph.frontend.packed_batch import DropoutNumbers, pack, padding
from hydragraph.spec import workload
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.field_ranges import FieldRange
from hydragraph.spec.padded import Batches, sequences_in
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy

DivideBy = Literal["targets", "sequences"] | float
"""Divisor of a step's summed losses: the global mini-batch's target or sequence count, or a number."""


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Validated mini-batch.

    Attributes:
        sequences: sequences whose labels are at the positions that predict them.
        lengths: token counts; 0 for sequences without targets, unless none has targets.
        tokens: number of targets.
    """

    sequences: tuple[workload.Sequence, ...]
    lengths: tuple[int, ...]
    tokens: int

    @classmethod
    def of(
        cls,
        given: Batches,
        causal: bool,
        fields: Mapping[str, workload.Field],
        limits: Sequence[FieldRange] = (),
        without_targets: bool = False,
    ) -> MiniBatch:
        """Validate sequences or padded batches (`hydragraph.spec.padded`).

        Raises:
            ValueError: a sequence is malformed or violates `limits`, or, unless `without_targets`, none has targets.
        """
        checked = tuple(workload.sequence_of(s, i, causal, fields) for i, s in enumerate(sequences_in(given, fields)))
        # `holds` is fast for all sequences at once; the loop finds the sequence to name.
        if not all(limit.holds(checked) for limit in limits):
            for i, sequence in enumerate(checked):
                for limit in limits:
                    limit.check(sequence, i)
        targets = [s.targets for s in checked]
        tokens = sum(targets)
        if not tokens and not (without_targets and checked):
            raise ValueError("the mini-batch has no target token: give at least one sequence of two tokens")
        lengths = tuple(len(s) if n or not tokens else 0 for s, n in zip(checked, targets, strict=True))
        return cls(checked, lengths, tokens)

    def divisor(self, divide_by: DivideBy) -> float:
        if divide_by == "targets":
            return max(1, self.tokens)
        if divide_by == "sequences":
            return len(self.sequences)
        number = isinstance(divide_by, numbers.Real) and not isinstance(divide_by, bool)
        if number and 0 < divide_by < math.inf:
            return float(divide_by)
        raise ValueError(f'divide_by is {divide_by!r}: pass "targets", "sequences" or a positive number')


@dataclass(frozen=True)
class PlanningTimes:
    """Times of an assignment, in seconds.

    Attributes:
        exposed_s: planning time that the step waited for.
        hidden_s: planning time that overlapped with other work.
        expected_s: predicted compute time of the iteration, or 0 without measurements.
    """

    exposed_s: float
    hidden_s: float = 0.0
    expected_s: float = 0.0


@dataclass(frozen=True, eq=False)
class AssignedBatch:
    """Mini-batch assigned to a strategy's pipelines.

    Attributes:
        batches: packed batches by pipeline and micro-batch; none in pipelines without this rank.
        padding: padding tokens in all pipelines.
    """

    strategy: Strategy
    assignment: Assignment
    batches: tuple[tuple[dict[str, Tensor], ...], ...]
    padding: int
    planning: PlanningTimes


def packed(
    batch: MiniBatch,
    strategy: Strategy,
    assignment: Assignment,
    rank: int,
    device: torch.device,
    several: bool,
    planning: PlanningTimes,
    unplaced: int | None = None,
    draws: DropoutNumbers | None = None,
) -> AssignedBatch:
    """Pack a rank's micro-batches; other arguments are as in `pack`."""
    mine = {place.pipeline for place in strategy.places(rank)}
    blanks = 0
    batches = []
    for p, micro_batches in enumerate(assignment.micro_batches):
        multiple = token_multiple(strategy.pipelines[p])
        blanks += sum(padding([batch.lengths[i] for i in m], multiple, several) for m in micro_batches)
        packs = (
            pack([batch.sequences[i] for i in m], multiple, device, several, unplaced, draws and draws.of(m))
            for m in micro_batches
        )
        batches.append(tuple(packs) if p in mine else ())
    return AssignedBatch(strategy, assignment, tuple(batches), blanks, planning)


def token_multiple(pipeline: Pipeline) -> int:
    return math.lcm(*(stage.tp for stage in pipeline.stages if stage.sequence_parallel))


def digest(text: str, batch: MiniBatch | None) -> int:
    """Return a 62-bit digest of inputs that ranks must agree on."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8)
    for sequence in batch.sequences if batch else ():
        hashed.update(sequence.ids.numpy().data)
        hashed.update(sequence.labels.numpy().data)
        for value in sequence.extra.values():
            # `view` may reject a one-element tensor's stride.
            flat = value.contiguous().as_strided((value.numel(),), (1,))
            hashed.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(hashed.digest()) >> 2

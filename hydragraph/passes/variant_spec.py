"""Specification of a variant, the graphs of a block on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Template
from hydragraph.spec.stage_kind import StagePart

# Only this pass depends on the device
COMPILE = "compile"


@dataclass(frozen=True)
class VariantSpec:
    """Everything that determines the graphs of one block on one rank.

    Attributes:
        learning: local names of parameters that get gradients, and "hidden" if the hidden state gets one.
        partitioner: "min_cut", or "default", which saves everything; ignored if the stage recomputes.
        added: whether matmuls accumulate gradients into buffers where possible (`passes.accumulate`).
        backend: "eager", or "inductor", which compiles for `device`.
    """

    template: Template
    parameters: Mapping[str, Parameter]
    part: StagePart
    dtype: torch.dtype
    learning: frozenset[str]
    partitioner: str = "min_cut"
    fused_head: bool = False
    added: bool = False
    backend: str = "eager"
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    where: str = "template"

    @property
    def passes(self) -> tuple[str, ...]:
        eager = self.backend == "eager"
        applies = {
            "shard": True,
            # `shard` fuses heads with a sharded vocabulary.
            "fuse_head": self.fused_head and self.part.tp == 1,
            "differentiate": True,
            # Gradient sums are in fp32. Inductor fuses the additions itself.
            "accumulate": self.added and eager and self.dtype is torch.float32,
            "sums_in_pieces": self.part.kind.sums_in_pieces,
            "overlap_collectives": self.part.tp > 1,
            COMPILE: self.backend == "inductor",
        }
        return tuple(name for name, applied in applies.items() if applied)

    @property
    def shards(self) -> tuple[object, ...]:
        return tuple((p.rule, p.local_shape(self.part.tp, self.part.index)) for p in self.parameters.values())

    @property
    def key(self) -> str:
        """Hash (64 hex digits) of the uncompiled graphs, equal in every process."""
        passes = [name for name in self.passes if name != COMPILE]
        how = (tuple(self.part.kind), str(self.dtype), sorted(self.learning), self.partitioner, self.fused_head, passes)
        return hashlib.sha256(repr((self.template.content, list(self.shards), how)).encode()).hexdigest()

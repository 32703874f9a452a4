"""Model sizes in a profile, to price traffic without the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.ir.program_outline import Outline

if TYPE_CHECKING:
    from hydragraph.ir.program import Program


@dataclass(frozen=True)
class ModelSizes:
    """A model's blocks and buckets.

    Attributes:
        hidden_bytes: bytes of one token's hidden state.
        itemsize: bytes per element of the compute dtype.
        heads: numbers of query heads, which tensor-parallel degrees must divide.
    """

    blocks: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    hidden_bytes: int
    itemsize: int
    heads: tuple[int, ...] = ()

    @classmethod
    def of(cls, program: Program) -> ModelSizes:
        from hydragraph.cost.graph_footprint import token_bytes

        first = program.templates[program.blocks[0].template].graph
        blocks = program.outline.blocks
        return cls(blocks, program.buckets, token_bytes(first), program.dtype.itemsize, program.heads)

    @classmethod
    def rough(cls, sizes: tuple[int, ...], hidden_bytes: int, itemsize: int) -> ModelSizes:
        """Return sizes with one evenly sharded parameter per block."""
        names = ("embed", *(f"layer.{i}" for i in range(len(sizes) - 2)), "head")[: len(sizes)]
        buckets = tuple(
            Bucket(name, (Parameter(f"{name}.weight", (size,), rule=ShardRule(0, (size,))),), (name,))
            for name, size in zip(names, sizes, strict=True)
            if size
        )
        return cls(names, buckets, hidden_bytes, itemsize)

    @cached_property
    def outline(self) -> Outline:
        return Outline.of(self.blocks, self.buckets)

    def allows(self, tp: int) -> bool:
        rules = (parameter.rule for bucket in self.buckets for parameter in bucket.parameters)
        return all(count % tp == 0 for count in self.heads) and all(rule is None or rule.allows(tp) for rule in rules)

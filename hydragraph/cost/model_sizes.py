"""Model sizes in a profile, to price traffic without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydragraph.ir.parameter import Bucket
    from hydragraph.ir.program import Program
    from hydragraph.ir.program_outline import Outline


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
        from hydragraph.ir.parameter import Bucket, Parameter

        buckets = []
        for bucket in program.buckets:
            parameters = tuple(
                Parameter(p.name, tuple(map(int, p.shape)), rule=p.rule, trainable=bucket.learns)
                for p in bucket.parameters
            )
            buckets.append(Bucket(bucket.name, parameters, tuple(bucket.blocks), bucket.learns))
        first = program.templates[program.blocks[0].template].graph
        blocks = tuple(block.name for block in program.blocks)
        return cls(blocks, tuple(buckets), token_bytes(first), program.dtype.itemsize, tuple(program.heads))

    @classmethod
    def rough(cls, sizes: tuple[int, ...], hidden_bytes: int, itemsize: int) -> ModelSizes:
        """Return sizes with one evenly sharded parameter per block."""
        from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

        names = ("embed", *(f"layer.{i}" for i in range(len(sizes) - 2)), "head")[: len(sizes)]
        buckets = tuple(
            Bucket(name, (Parameter(f"{name}.weight", (size,), rule=ShardRule(0, (size,))),), (name,))
            for name, size in zip(names, sizes, strict=True)
            if size
        )
        return cls(names, buckets, hidden_bytes, itemsize)

    @cached_property
    def outline(self) -> Outline:
        from hydragraph.ir.program_outline import Outline

        # Buckets without blocks are never pulled or pushed.
        used = [bucket for bucket in self.buckets if bucket.blocks]
        return Outline(
            self.blocks,
            tuple((bucket.name, bucket.blocks) for bucket in used),
            tuple(bucket.name for bucket in used if not bucket.learns),
            tuple(bucket.size for bucket in used),
        )

    def allows(self, tp: int) -> bool:
        rules = (parameter.rule for bucket in self.buckets for parameter in bucket.parameters)
        return all(count % tp == 0 for count in self.heads) and all(rule is None or rule.allows(tp) for rule in rules)

    def to_record(self) -> dict[str, Any]:
        weights = [
            {
                "name": bucket.name,
                "tensors": [
                    {"name": p.name, "shape": p.shape, "rule": p.rule and asdict(p.rule)} for p in bucket.parameters
                ],
                "blocks": bucket.blocks,
                "learns": bucket.learns,
            }
            for bucket in self.buckets
        ]
        sizes = {"hidden_bytes": self.hidden_bytes, "itemsize": self.itemsize, "heads": self.heads}
        return {"blocks": self.blocks, "weights": weights, **sizes}

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> ModelSizes:
        from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

        buckets = []
        for record in data["weights"]:
            parameters = []
            for tensor in record["tensors"]:
                cut = tensor["rule"]
                rule = cut and ShardRule(**{**cut, "segments": tuple(cut["segments"])})
                parameters.append(
                    Parameter(tensor["name"], tuple(tensor["shape"]), rule=rule, trainable=record["learns"])
                )
            buckets.append(Bucket(record["name"], tuple(parameters), tuple(record["blocks"]), record["learns"]))
        heads = tuple(data.get("heads", ()))
        return cls(tuple(data["blocks"]), tuple(buckets), data["hidden_bytes"], data["itemsize"], heads)
